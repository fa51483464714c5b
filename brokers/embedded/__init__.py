"""The reference semantics, kept in SQLite: one engine behind `sqlite:` and `memory:`."""

from holdfast.brokers.embedded.broker import EmbeddedBroker
from holdfast.brokers.embedded.store import FileStore, MemoryStore

__all__ = ["EmbeddedBroker", "FileStore", "MemoryStore"]
