"""The transactional outbox: events that exist if and only if the transaction commits."""

from holdfast.outbox.relay import Relay
from holdfast.outbox.schema import create_tables, metadata
from holdfast.outbox.staging import Outbox

__all__ = ["Outbox", "Relay", "create_tables", "metadata"]
