"""The transactional outbox: events that exist if and only if the transaction commits."""

from holdfast.outbox.engine import RelayEngine, Step
from holdfast.outbox.event import Event
from holdfast.outbox.lease_engine import LeaseEngine
from holdfast.outbox.leases import LeaseTerms
from holdfast.outbox.relay import Health, Relay
from holdfast.outbox.schema import create_tables, metadata
from holdfast.outbox.shard_sinks import ShardSinks
from holdfast.outbox.staging import Outbox

__all__ = [
    "Event",
    "Health",
    "LeaseEngine",
    "LeaseTerms",
    "Outbox",
    "Relay",
    "RelayEngine",
    "ShardSinks",
    "Step",
    "create_tables",
    "metadata",
]
