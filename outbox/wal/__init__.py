"""The WAL engine of the relay: PostgreSQL's replication slot instead of polling."""

from holdfast.extras import driver

driver("psycopg", extra="postgres")  # the modules below need it

from holdfast.outbox.wal.emitted import WalOutbox  # noqa: E402
from holdfast.outbox.wal.engine import WalEngine  # noqa: E402
from holdfast.outbox.wal.faults import DatabaseDown  # noqa: E402
from holdfast.outbox.wal.slot import drop_slot  # noqa: E402

__all__ = ["DatabaseDown", "WalEngine", "WalOutbox", "drop_slot"]
