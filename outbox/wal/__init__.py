"""The WAL engine of the relay: PostgreSQL's replication slot instead of polling."""

from typing import TYPE_CHECKING

from holdfast.lazily import lazily

if TYPE_CHECKING:
    from holdfast.outbox.wal.emitted import WalOutbox
    from holdfast.outbox.wal.engine import WalEngine
    from holdfast.outbox.wal.faults import DatabaseDown
    from holdfast.outbox.wal.slot import drop_slot

__all__ = ["DatabaseDown", "WalEngine", "WalOutbox", "drop_slot"]

__getattr__ = lazily(
    __name__,
    {"DatabaseDown": "faults", "WalEngine": "engine", "WalOutbox": "emitted", "drop_slot": "slot"},
    module="psycopg",
    extra="postgres",
)
