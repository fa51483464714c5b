"""The tables of the orchestrator, and the one in which a participant keeps its marks.

Moments are POSIX seconds by the database's clock: the only one that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    DDL,
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
    UniqueConstraint,
    event,
)

from holdfast.db.audit import audit_tables
from holdfast.db.lease import LeaseColumns
from holdfast.db.types import Bytes, hex_digest, name

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""

_Name = name()
_Id = hex_digest(36)
_Word = hex_digest(16)

saga = Table(
    "holdfast_saga",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("type", _Name, nullable=False),
    Column("version", Integer, nullable=False),
    Column("hash", _Word, nullable=False),
    Column("business_key", _Name, nullable=False),
    Column("active_key", _Name),
    Column("status", _Word, nullable=False),
    Column("progress", Bytes, nullable=False),
    Column("data", Bytes, nullable=False),
    Column("start_digest", _Word, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("reason", Text),
    Column("correlation_id", _Name),
    Column("traceparent", String(64)),
    Column("started_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("deadline_at", Double),
    Column("ended_at", Double),
    Column("alerted_at", Double),
    UniqueConstraint("type", "active_key", name="holdfast_saga_active"),
    Index("holdfast_saga_key", "business_key", "type"),
    Index("holdfast_saga_deadline", "deadline_at"),
    Index("holdfast_saga_status", "status", "id"),
)
"""One row per saga. `active_key` is the business key until the end, so that it is taken once at a
time; `revision` grows with every transition, and nobody writes over one that he has not read. One
that has ended has no `deadline_at`: the index of deadlines holds the running ones alone.

No index holds what changes with every transition, and pages have room left: so PostgreSQL writes
the new version of a row beside the old one, and touches no index (a HOT update)."""

_ROOM = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 70)")  # type: ignore[no-untyped-call]
event.listen(saga, "after_create", _ROOM.execute_if(dialect="postgresql"))

step = Table(
    "holdfast_saga_step",
    metadata,
    Column("saga_id", _Id, primary_key=True),
    Column("step", _Name, primary_key=True),
    Column("direction", _Word, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("status", _Word, nullable=False),
    Column("message_id", _Id),
    Column("began_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("error", Text),
)
"""Every attempt at a step, and what came of it; for people, no decision reads it."""

timer = Table(
    "holdfast_saga_timer",
    metadata,
    Column("saga_id", _Id, primary_key=True),
    Column("step", _Name, primary_key=True),
    Column("direction", _Word, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("kind", _Word, primary_key=True),
    Column("type", _Name, nullable=False),
    Column("version", Integer, nullable=False),
    Column("due", Double, nullable=False),
    Column("tries", SmallInteger, nullable=False),
    Column("payload", Bytes),
    Column("owner", String(64)),
    Column("until", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Index("holdfast_saga_timer_due", "due"),
)
"""What is due when: timeouts, retries, sleeps, deadlines, local steps, what operators ask for."""

timer_lease = LeaseColumns(
    until=timer.c.until, owner=timer.c.owner, epoch=timer.c.epoch, rows_return=True
)
"""Who works on a timer; one that is set again has a higher epoch than any before."""

signal = Table(
    "holdfast_saga_signal",
    metadata,
    Column("saga_id", _Id, primary_key=True),
    Column("name", _Name, primary_key=True),
    Column("payload", Bytes),
    Column("at", Double, nullable=False),
)
"""Signals that came before they were waited for."""

history = Table(
    "holdfast_saga_history",
    metadata,
    Column("saga_id", _Id, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("event", Bytes, nullable=False),
    Column("effects", Bytes, nullable=False),
    Column("causation_id", _Name),
)
"""What happened, in order, and what followed from it; rows are only added."""

mark = Table(
    "holdfast_saga_mark",
    metadata,
    Column("saga_id", _Id, primary_key=True),
    Column("step", _Name, primary_key=True),
    Column("status", _Word, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("answer", _Word, nullable=False),
    Column("reply", Bytes),
    Column("reply_type", _Name),
    Column("content_type", _Name),
    Column("error", Text),
    Column("at", Double, nullable=False),
    Index("holdfast_saga_mark_at", "at"),
)
"""A participant's memory of a step, written in the transaction of its effect."""

lock = Table(
    "holdfast_saga_lock",
    metadata,
    Column("resource", _Name, primary_key=True),
    Column("saga_id", _Id),
    Column("until", Double, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Index("holdfast_saga_lock_saga", "saga_id"),
)
"""What sagas keep others from; a row stays when it is released, so that its fence only grows."""

lock_lease = LeaseColumns(until=lock.c.until, owner=lock.c.saga_id, epoch=lock.c.fence)
"""Who holds a resource."""

audit, audit_head = audit_tables(metadata)
"""What was done by hand, by whom and why."""


def create_tables(bind: Engine | Connection) -> None:
    """Create the tables of sagas where they are missing; in production prefer the migrations."""
    metadata.create_all(bind)
