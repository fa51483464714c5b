"""The outbox tables, in the columns that Debezium's outbox event router expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Double,
    Index,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)

from holdfast.db import tables
from holdfast.db.audit import audit_tables
from holdfast.db.options import with_options
from holdfast.db.types import Bytes, Sequence, UniqueId, name

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

SHARDS = 64
"""How many parts of the outbox relays can share; a key belongs to one of them for good."""

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""


def _event_columns() -> list[Column[object]]:
    return [
        Column("id", UniqueId, nullable=False),
        Column("aggregatetype", name(), nullable=False),
        Column("aggregateid", name()),
        Column("type", String(255), nullable=False),
        Column("payload", Bytes),
        Column("headers", JSON, nullable=False),
        Column("shard", SmallInteger, nullable=False),
    ]


outbox = Table(
    "holdfast_outbox",
    metadata,
    Column("seq", Sequence, primary_key=True),
    *_event_columns(),
)
"""Rows are inserted and deleted, never updated; `seq` alone is indexed."""
with_options(outbox, sqlite_autoincrement=True)  # a sequence number is never used twice

delayed = Table(
    "holdfast_outbox_delayed",
    metadata,
    Column("seq", Sequence, primary_key=True),
    *_event_columns(),
    Column("due", Double, nullable=False),
    Index("holdfast_outbox_delayed_due", "due"),
)
"""Events that are not to be published before `due` (POSIX seconds, by the database's clock)."""
with_options(delayed, sqlite_autoincrement=True)

shard = Table(
    "holdfast_outbox_shard",
    metadata,
    Column("shard", SmallInteger, primary_key=True, autoincrement=False),
    Column("owner", String(64)),
    Column("until", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
)
"""Who may publish which shard, until when (by the database's clock)."""

relay = Table(
    "holdfast_outbox_relay",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("until", Double, nullable=False),
    Column("engine", String(16), nullable=False),
    Column("host", String(255), nullable=False),
)
"""The relays alive now, so that they share the shards fairly."""

parked = Table(
    "holdfast_outbox_parked",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    *_event_columns(),
    Column("error", Text),
    Column("parked_at", DateTime(timezone=True), nullable=False),
    Column("state", String(16), nullable=False),
    Index("holdfast_outbox_parked_key", "aggregatetype", "aggregateid"),
)
"""Events that the broker refused (state 'refused'), those of their key that wait behind
('behind'), and what an operator let go ('released')."""

audit, audit_head = audit_tables(metadata)
"""What was done, by whom and why; payloads are never written here."""


def require_tables(db: Connection) -> None:
    """Raise `MissingTables` unless all outbox tables are there."""
    otherwise = " (or include holdfast.outbox.metadata in your own migrations)"
    tables.require_tables(db, metadata, otherwise=otherwise)


def create_tables(bind: Engine | Connection) -> None:
    """Create the outbox tables where they are missing; in production prefer the migrations."""
    metadata.create_all(bind)
