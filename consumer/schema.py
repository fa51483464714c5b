"""The consumer's own tables: held keys, the messages parked behind them, and who let them go.

Moments are POSIX seconds by the database's clock: the only one that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from holdfast.audit import audit_tables

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""

_Sequence = BigInteger().with_variant(Integer, "sqlite")
_Name = String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_Hash = String(64).with_variant(mysql.VARCHAR(64, collation="ascii_bin"), "mysql", "mariadb")
_Bytes = LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb")


def _key() -> list[Column[Any]]:
    return [
        Column("grp", _Name, primary_key=True),
        Column("topic", _Name, primary_key=True),
        Column("key_hash", _Hash, primary_key=True),
    ]


held_key = Table(
    "holdfast_held_key",
    metadata,
    *_key(),
    Column("key", _Bytes),
    Column("dlq_id", String(64)),
    Column("due", Double),
    Column("parked", Integer, nullable=False),
    Column("since", Double, nullable=False),
    Column("owner", String(64)),
    Column("until", Double, nullable=False),
    Column("note", Text),
    Index("holdfast_held_key_due", "due", "grp"),
)
"""Keys that wait: for a retry that is due later, or (`dlq_id`) for a dead letter to be closed."""

held = Table(
    "holdfast_held",
    metadata,
    Column("seq", _Sequence, primary_key=True),
    Column("grp", _Name, nullable=False),
    Column("topic", _Name, nullable=False),
    Column("key_hash", _Hash, nullable=False),
    Column("message_id", _Name, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("position", String(64), nullable=False),
    Column("headers", _Bytes, nullable=False),
    Column("body", _Bytes),
    Column("stored", Double),
    Column("attempt", Integer, nullable=False),
    Column("parked_at", Double, nullable=False),
    Index("holdfast_held_in_order", "grp", "topic", "key_hash", "seq"),
    sqlite_autoincrement=True,
)
"""The messages of held keys, in order; they are settled on the broker already."""

audit, audit_head = audit_tables(metadata)
"""What was done, by whom and why; payloads are never written here."""

circuit = Table(
    "holdfast_circuit",
    metadata,
    Column("name", _Name, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("is_open", SmallInteger, nullable=False),
    Column("until", Double, nullable=False),
)
"""The last word about each circuit that processes share."""


class database_now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock, in POSIX seconds."""

    type = Double()
    inherit_cache = True


@compiles(database_now, "postgresql")
def _postgresql_now(*_: Any, **__: Any) -> str:
    return "extract(epoch FROM clock_timestamp())"


@compiles(database_now, "mysql")
@compiles(database_now, "mariadb")
def _mysql_now(*_: Any, **__: Any) -> str:
    # In UTC: a local clock shows an hour twice when summer time ends.
    return "(timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1e6)"


@compiles(database_now, "sqlite")
def _sqlite_now(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


def create_tables(bind: Engine | Connection) -> None:
    """Create every table that a consumer needs, where missing; in production use migrations."""
    from holdfast import dlq, idempotency

    metadata.create_all(bind)
    idempotency.create_tables(bind)
    if hasattr(dlq, "create_tables"):
        dlq.create_tables(bind)
