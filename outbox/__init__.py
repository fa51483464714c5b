"""The transactional outbox: events that exist if and only if the transaction commits."""

from typing import TYPE_CHECKING

from holdfast.extras import lazily
from holdfast.outbox.event import Event
from holdfast.outbox.outbox import Outbox
from holdfast.outbox.schema import create_tables, metadata

if TYPE_CHECKING:
    from holdfast.outbox.parked import EventEdit, ParkedKeys, ParkedSelection
    from holdfast.outbox.relay.lease_engine import LeaseEngine
    from holdfast.outbox.relay.leases import LeaseTerms
    from holdfast.outbox.relay.publishing import ShardSinks
    from holdfast.outbox.relay.relay import Health, Relay, RelayEngine, RelayStep

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

# Whoever stages events needs no relay.
__getattr__ = lazily(
    __name__,
    {
        "parked": "EventEdit ParkedKeys ParkedSelection",
        "relay.lease_engine": "LeaseEngine",
        "relay.leases": "LeaseTerms",
        "relay.publishing": "ShardSinks",
        "relay.relay": "Health Relay RelayEngine RelayStep",
    },
)
