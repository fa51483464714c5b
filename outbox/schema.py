"""The outbox table, in the columns that Debezium's outbox event router expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import JSON, BigInteger, Column, Integer, LargeBinary, MetaData, String, Table

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

metadata = MetaData()
"""Include it in your own Alembic metadata to manage the tables with your migrations."""

outbox = Table(
    "holdfast_outbox",
    metadata,
    # SQLite counts only a plain INTEGER key by itself; elsewhere 64 bits are asked for.
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("id", String(64), nullable=False),
    Column("aggregatetype", String(255), nullable=False),
    Column("aggregateid", String(255)),
    Column("type", String(255), nullable=False),
    Column("payload", LargeBinary),
    Column("headers", JSON, nullable=False),
    sqlite_autoincrement=True,  # a sequence number is never used twice
)


def create_tables(bind: Engine | Connection) -> None:
    """Create the outbox table where it is missing."""
    metadata.create_all(bind)
