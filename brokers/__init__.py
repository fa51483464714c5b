"""Broker adapters and the registry that finds them by URL."""

from holdfast.brokers.registry import connect, schemes

__all__ = ["connect", "schemes"]
