"""The WAL engine of the relay: PostgreSQL's replication slot instead of polling."""

from typing import TYPE_CHECKING

from holdfast.extras import lazily

if TYPE_CHECKING:
    from holdfast.outbox.wal.engine import WalEngine
    from holdfast.outbox.wal.errors import ReplicationDown
    from holdfast.outbox.wal.slot import drop_slot

__all__ = ["ReplicationDown", "WalEngine", "drop_slot"]

__getattr__ = lazily(
    __name__,
    {"engine": "WalEngine", "errors": "ReplicationDown", "slot": "drop_slot"},
    module="psycopg",
    extra="postgres",
)
