"""The tables of the consumer side: inbox, leases, versions, and the attempt ledger.

Moments are POSIX seconds by the database's clock: the only one that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

from holdfast.db.options import with_options
from holdfast.db.types import Bytes, fixed_bytes, name

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""


def _handled_key() -> list[Column[object]]:
    return [
        Column("consumer", BigInteger, primary_key=True, autoincrement=False),
        Column("message", fixed_bytes(16), primary_key=True),
    ]


inbox = Table(
    "holdfast_inbox",
    metadata,
    *_handled_key(),
    Column("handled_at", Double, nullable=False),
    Column("digest", fixed_bytes(8), nullable=False),
    Column("result", Bytes),
    # Rows come in the order of time, so a block range index finds the old ones for nothing.
    with_options(Index("holdfast_inbox_handled_at", "handled_at"), postgresql_using="brin"),
)
"""What each consumer has handled. Consumer and message are digests: rows stay narrow."""
with_options(inbox, sqlite_with_rowid=False)

roster = Table(
    "holdfast_inbox_consumer",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(1024), nullable=False),
    Column("window_seconds", Double),
)
"""Which consumer an inbox row belongs to, and how long its rows are kept (NULL: for ever)."""

scope = Table(
    "holdfast_inbox_scope",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("carried_at", Double, nullable=False),
)
"""Since when a consumer of the roster is in the hands of this version: 0 from its beginning.

A table of its own, so that a database whose tables the program creates needs no change of one
that is there.
"""

lease = Table(
    "holdfast_inbox_lease",
    metadata,
    *_handled_key(),
    Column("token", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
)
"""Who works on a message whose effect is outside the database; the token only grows."""
with_options(lease, sqlite_with_rowid=False)

version = Table(
    "holdfast_version",
    metadata,
    Column("consumer", BigInteger, primary_key=True, autoincrement=False),
    Column("entity", name(), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("stale", BigInteger, nullable=False),
    Column("last_stale", BigInteger),
    Column("changed_at", Double, nullable=False),
)
"""The version of each entity that a consumer has applied, and what came too late for it."""

ahead = Table(
    "holdfast_ahead",
    metadata,
    Column("consumer", BigInteger, primary_key=True, autoincrement=False),
    Column("entity", name(), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("content", Bytes, nullable=False),
    Column("held_at", Double, nullable=False),
)
"""Messages that came before their predecessor, kept until the gap closes."""

owner = Table(
    "holdfast_owner",
    metadata,
    Column("owner", name(64), primary_key=True),
    Column("until", Double, nullable=False),
)
"""The processes that run handlers, and until when each is believed to live."""

start = Table(
    "holdfast_start",
    metadata,
    Column("consumer", name(), primary_key=True),
    Column("message_id", name(), primary_key=True),
    Column("owner", name(64), primary_key=True),
    Column("alone", SmallInteger, nullable=False),
    Column("at", Double, nullable=False),
)
"""Messages that a process has taken up and not finished; a dead owner's are crashes.

*alone* is 1 where only suspects ran beside it and 0 else; less two once the message was settled.
"""

attempt = Table(
    "holdfast_attempt",
    metadata,
    Column("consumer", name(), primary_key=True),
    Column("message_id", name(), primary_key=True),
    Column("failed", Integer, nullable=False),
    Column("released", Integer, nullable=False),
    Column("crashed", Integer, nullable=False),
    Column("suspected", Integer, nullable=False),
    Column("first_failed_at", Double),
    Column("last_failed_at", Double),
    Column("last_error", Text),
    Column("changed_at", Double, nullable=False),
    Index("holdfast_attempt_changed_at", "changed_at"),
)
"""How often a message failed, was released, or ended its process; nothing for good ones."""


def create_tables(bind: Engine | Connection) -> None:
    """Create the tables where they are missing; in production prefer the migrations."""
    metadata.create_all(bind)
