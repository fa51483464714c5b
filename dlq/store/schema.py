"""The dead-letter tables. Moments are POSIX seconds (UTC), alike on every database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
)

from holdfast.db.audit import audit_tables
from holdfast.db.options import with_options
from holdfast.db.types import Bytes, Document, Sequence, name

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""


message = Table(
    "holdfast_dlq_message",
    metadata,
    Column("seq", Sequence, primary_key=True),
    Column("dlq_id", name(36), nullable=False),
    Column("group_id", name(32), nullable=False),
    Column("state", name(16), nullable=False),
    # the original, never changed
    Column("message_id", name(), nullable=False),
    Column("topic", name(), nullable=False),
    Column("type", name(), nullable=False),
    Column("source", Document, nullable=False),
    Column("message_key", Bytes),
    Column("key_hash", name(32)),
    Column("payload", Bytes),
    Column("headers", Document, nullable=False),
    Column("event_at", Double, nullable=False),
    Column("correlation_id", name()),
    Column("causation_id", name()),
    Column("content_type", name()),
    Column("schema_ref", Document),
    Column("traceparent", name()),
    Column("exact", Document),
    Column("broker", name(64), nullable=False),
    Column("lane", Integer),
    Column("position", name(64)),
    # who failed, and how
    Column("consumer_group", name(), nullable=False),
    Column("handler", name(), nullable=False),
    Column("service_version", name(64), nullable=False),
    Column("stage", name(16), nullable=False),
    Column("class", name(16), nullable=False),
    Column("error_type", name(), nullable=False),
    Column("error_text", Document, nullable=False),
    Column("fingerprint", name(64), nullable=False),
    Column("shape", name(64), nullable=False),
    Column("envelope", Document, nullable=False),
    Column("schema_version", Integer, nullable=False),
    Column("origin", name(16), nullable=False),
    Column("tenant", name()),
    Column("entity_ref", name()),
    Column("subject", name()),
    # what became of it
    Column("attempts", Integer, nullable=False),
    Column("occurrences", Integer, nullable=False),
    Column("first_failed_at", Double, nullable=False),
    Column("last_failed_at", Double, nullable=False),
    Column("history", Document, nullable=False),
    Column("stored_at", Double, nullable=False),
    Column("replay_count", Integer, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("replayable", Boolean, nullable=False),
    Column("verdict", name(16), nullable=False),
    Column("retries", Integer, nullable=False),
    Column("due_at", Double),
    Column("closed_at", Double),
    Column("closed_by", name()),
    Column("closed_reason", Document),
    Column("expires_at", Double),
    Index("holdfast_dlq_message_id", "dlq_id", unique=True),
    Index("holdfast_dlq_message_group", "group_id", "state", "seq"),
    Index("holdfast_dlq_message_state", "state", "stored_at"),
    Index("holdfast_dlq_message_due", "due_at"),
    Index("holdfast_dlq_message_key", "key_hash"),
    Index("holdfast_dlq_message_message", "message_id"),
    Index("holdfast_dlq_message_subject", "subject"),
    Index("holdfast_dlq_message_correlation", "correlation_id"),
)
"""One row per dead letter. `state`: pending, or closed as confirmed, discarded or parked. `exact`
holds attributes of the message that their columns do not take as they are."""
with_options(message, sqlite_autoincrement=True)

revision = Table(
    "holdfast_dlq_revision",
    metadata,
    Column("dlq_id", name(36), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("payload", Bytes),
    Column("headers", Document, nullable=False),
    Column("difference", Document, nullable=False),
    Column("transform", name(), nullable=False),
    Column("actor", name(), nullable=False),
    Column("reason", Document, nullable=False),
    Column("made_at", Double, nullable=False),
)
"""Edits of a dead letter, from 1; the original stays as it is."""

overtaken = Table(
    "holdfast_dlq_overtaken",
    metadata,
    Column("dlq_id", name(36), primary_key=True),
    Column("message_id", name(), nullable=False),
    Column("lane", Integer),
    Column("position", name(64)),
    Column("handled_at", Double, nullable=False),
)
"""The first newer event of a dead letter's key that was handled before it: which, and when."""

group = Table(
    "holdfast_dlq_group",
    metadata,
    Column("group_id", name(32), primary_key=True),
    Column("fingerprint", name(64), nullable=False),
    Column("algorithm", name(8), nullable=False),
    Column("consumer_group", name(), nullable=False),
    Column("topic", name(), nullable=False),
    Column("handler", name(), nullable=False),
    Column("title", Document, nullable=False),
    Column("error_type", name(), nullable=False),
    Column("class", name(16), nullable=False),
    Column("stage", name(16), nullable=False),
    Column("hints", Document, nullable=False),
    Column("sample", name(36), nullable=False),
    Column("state", name(16), nullable=False),
    Column("muted_until", Double),
    Column("owner", name()),
    Column("note", Document),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("arrived", BigInteger, nullable=False),
    Column("reopened", BigInteger, nullable=False),
    Column("confirmed", BigInteger, nullable=False),
    Column("discarded", BigInteger, nullable=False),
    Column("parked", BigInteger, nullable=False),
    Column("alerted_at", Double),
    Column("moved_to", name(32)),
    Index("holdfast_dlq_group_state", "state"),
)
"""One row per problem. Its figures are as of the last fold of `holdfast_dlq_change`."""

change = Table(
    "holdfast_dlq_change",
    metadata,
    Column("seq", Sequence, primary_key=True),
    Column("group_id", name(32), nullable=False),
    Column("kind", name(16), nullable=False),
    Column("n", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("key_hash", name(32)),
    Column("tenant", name()),
    Column("version", name(64)),
)
"""What happened to the figures since the last fold: appended, so that writers never wait."""
with_options(change, sqlite_autoincrement=True)

hour = Table(
    "holdfast_dlq_hour",
    metadata,
    Column("group_id", name(32), primary_key=True),
    Column("hour", Integer, primary_key=True, autoincrement=False),
    Column("arrived", BigInteger, nullable=False),
    Column("closed", BigInteger, nullable=False),
    Index("holdfast_dlq_hour_hour", "hour"),
)
"""Inflow and outflow by group and hour (hours since 1970)."""

hit = Table(
    "holdfast_dlq_hit",
    metadata,
    Column("group_id", name(32), primary_key=True),
    Column("kind", name(8), primary_key=True),
    Column("value", name(), primary_key=True),
)
"""Which keys (by hash), tenants and versions a group hits; bounded."""

regrouped = Table(
    "holdfast_dlq_regrouped",
    metadata,
    Column("old_group", name(32), primary_key=True),
    Column("new_group", name(32), primary_key=True),
    Column("algorithm", name(8), nullable=False),
    Column("moved", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
)
"""Where the messages of a group went when the algorithm changed."""

audit, audit_head = audit_tables(metadata)
"""What was done, by whom and why: each row holds the hash of the row before it."""

head = Table(
    "holdfast_dlq_head",
    metadata,
    Column("name", name(16), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("hash", name(64), nullable=False),
)
"""The lock that lets one at a time fold, and how many letters were fixed by hand."""

subject_key = Table(
    "holdfast_dlq_subject",
    metadata,
    Column("subject", name(), primary_key=True),
    Column("wrapped", Bytes),
    Column("made_at", Double, nullable=False),
    Column("forgotten_at", Double),
)
"""The key of each data subject, wrapped; without it the subject's fields are noise."""

stream = Table(
    "holdfast_dlq_stream",
    metadata,
    Column("name", name(64), primary_key=True),
    Column("topic", name(), primary_key=True),
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("position", BigInteger, nullable=False),
    Column("batch", BigInteger, nullable=False),
)
"""How far a stream has stored each partition of a dead-letter topic: the next offset, and the
number of the batch that got there. Written in the transaction of the letters."""


def create_tables(bind: Engine | Connection) -> None:
    """Create the dead-letter tables where missing; in production prefer the migrations."""
    metadata.create_all(bind)
