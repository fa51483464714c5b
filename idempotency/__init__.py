"""Effects that happen once: the dedup row commits with the work."""

from holdfast.idempotency.inbox import Inbox, create_tables, metadata
from holdfast.idempotency.layer import idempotent

__all__ = ["Inbox", "create_tables", "idempotent", "metadata"]
