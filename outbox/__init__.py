"""The transactional outbox: events that exist if and only if the transaction commits."""

from holdfast.outbox.event import Event
from holdfast.outbox.outbox import Outbox
from holdfast.outbox.parked import EventEdit, ParkedKeys, ParkedSelection
from holdfast.outbox.relay.lease_engine import LeaseEngine
from holdfast.outbox.relay.leases import LeaseTerms
from holdfast.outbox.relay.publishing import ShardSinks
from holdfast.outbox.relay.relay import Health, Relay, RelayEngine, RelayStep
from holdfast.outbox.schema import create_tables, metadata

__all__ = [
    "Event",
    "EventEdit",
    "Health",
    "LeaseEngine",
    "LeaseTerms",
    "Outbox",
    "ParkedKeys",
    "ParkedSelection",
    "Relay",
    "RelayEngine",
    "RelayStep",
    "ShardSinks",
    "create_tables",
    "metadata",
]
