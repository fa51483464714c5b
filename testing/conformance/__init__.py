"""The conformance kit for broker adapters; needs pytest."""

from holdfast.testing.conformance.kit import BrokerConformance

__all__ = ["BrokerConformance"]
