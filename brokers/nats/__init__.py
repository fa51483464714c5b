"""`nats://host:4222`, `tls://host:4222`: NATS JetStream, server 2.10 or newer."""

from holdfast.brokers.nats.broker import NatsBroker

__all__ = ["NatsBroker"]
