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
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)

from holdfast import dlq, idempotency
from holdfast.db import tables
from holdfast.db.audit import audit_tables
from holdfast.db.options import with_options
from holdfast.db.types import Bytes, Document, Sequence, hex_digest, name
from holdfast.tracing.schema import metadata as lineage_metadata

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""


def _key() -> list[Column[Any]]:
    return [
        Column("grp", name(), primary_key=True),
        Column("topic", name(), primary_key=True),
        Column("key_hash", hex_digest(64), primary_key=True),
    ]


held_key = Table(
    "holdfast_held_key",
    metadata,
    *_key(),
    Column("key", Bytes),
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
    Column("seq", Sequence, primary_key=True),
    Column("grp", name(), nullable=False),
    Column("topic", name(), nullable=False),
    Column("key_hash", hex_digest(64), nullable=False),
    Column("message_id", name(), nullable=False),
    Column("partition", Integer, nullable=False),
    Column("position", String(64), nullable=False),
    Column("headers", Bytes, nullable=False),
    Column("body", Bytes),
    Column("stored", Double),
    Column("attempt", Integer, nullable=False),
    Column("parked_at", Double, nullable=False),
    Column("rules", Document),
    Index("holdfast_held_in_order", "grp", "topic", "key_hash", "seq"),
)
"""The messages of held keys, in order; they are settled on the broker already.

*rules* say what a dead letter of the message must hide, for commands that do not know its handler.
NULL: an older version parked it and did not say.
"""
with_options(held, sqlite_autoincrement=True)

audit, audit_head = audit_tables(metadata)
"""What was done, by whom and why; payloads are never written here."""

circuit = Table(
    "holdfast_circuit",
    metadata,
    Column("name", name(), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("is_open", SmallInteger, nullable=False),
    Column("until", Double, nullable=False),
)
"""The last word about each circuit that processes share."""


def require_tables(db: Connection, *, lineage: bool = False) -> None:
    """Raise `MissingTables` unless every table that a consumer writes to is there."""
    wanted = (metadata, idempotency.metadata, dlq.metadata)
    tables.require_tables(
        db, *wanted, otherwise=", or call holdfast.consumer.create_tables(engine)"
    )
    if lineage:
        otherwise = ", or call holdfast.tracing.create_tables(engine)"
        tables.require_tables(db, lineage_metadata, otherwise=otherwise)


def create_tables(bind: Engine | Connection) -> None:
    """Create every table that a consumer needs, where missing; in production use migrations."""
    metadata.create_all(bind)
    idempotency.create_tables(bind)
    dlq.create_tables(bind)
