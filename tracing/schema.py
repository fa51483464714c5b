"""The table in which a service writes down which events it published and handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Column, Double, Index, MetaData, Table, Text

from holdfast.db.options import with_options
from holdfast.db.types import Sequence, hex_digest, name

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the table with your migrations."""

_Name = name()

lineage = Table(
    "holdfast_lineage",
    metadata,
    Column("seq", Sequence, primary_key=True),
    Column("event_id", _Name, nullable=False),
    Column("type", _Name, nullable=False),
    Column("correlation_id", _Name, nullable=False),
    Column("causation_id", _Name),
    Column("source", _Name, nullable=False),
    Column("topic", _Name, nullable=False),
    Column("message_key", _Name),
    Column("time", Double, nullable=False),
    Column("outcome", hex_digest(16), nullable=False),
    Column("service", _Name, nullable=False),
    Column("error", Text),
    Column("at", Double, nullable=False),
    Index("holdfast_lineage_correlation", "correlation_id"),
)
"""One row per event and what a service did with it. `time` is the event's own, by the clock of its
producer; `at` is when the row was written, by the clock of this database. Rows are only added.

Each index is paid for by every event: the first event of a correlation, whose id that is, is
found by `correlation_id` alone, and types are looked for near a number."""
with_options(
    Index("holdfast_lineage_caused", lineage.c.event_id),
    postgresql_where=lineage.c.event_id != lineage.c.correlation_id,
    sqlite_where=lineage.c.event_id != lineage.c.correlation_id,
)


def create_tables(bind: Engine | Connection) -> None:
    """Create the table of lineage where it is missing; in production prefer the migrations."""
    metadata.create_all(bind)
