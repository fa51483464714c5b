"""The tables of replay plans; they belong to the branch `dlq` with the dead letters."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects import mysql

from holdfast.dlq.schema import metadata

# MySQL compares text without regard to case, which would merge ids of foreign making.
_Id = String(36).with_variant(mysql.VARCHAR(36, collation="utf8mb4_bin"), "mysql", "mariadb")
_Document = Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")

plan = Table(
    "holdfast_replay_plan",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("reason", _Document, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("high_water", BigInteger, nullable=False),
    Column("selection", _Document, nullable=False),
    Column("policy", _Document, nullable=False),
    Column("rate", Double),
    Column("target", String(255)),
    Column("fingerprints", _Document, nullable=False),
    Column("transform", String(255)),
    Column("approval", Integer, nullable=False),
    Column("approved_by", String(255)),
    Column("approved_at", Double),
    Column("sent", BigInteger, nullable=False),
    Column("forgiven", BigInteger, nullable=False),
    Column("stopped_because", _Document),
    Column("owner", String(255)),
    Column("epoch", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
    Column("ended_at", Double),
    Index("holdfast_replay_plan_state", "state", "created_at"),
)
"""One row per plan. `sent` is the mark below which every item has been published; `owner`,
`epoch` and `until` (POSIX seconds, by the database's clock) are the lease of its sender."""

item = Table(
    "holdfast_replay_item",
    metadata,
    Column("plan_id", _Id, primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("dlq_id", _Id, nullable=False),
    Column("live", _Id),
    Column("state", String(16), nullable=False),
    Column("key_hash", String(32), nullable=False),
    Column("fingerprint", String(64)),
    Column("again", String(64)),
    Column("note", _Document),
    Column("settled_at", Double),
    Column("seq", BigInteger),
    Index("holdfast_replay_item_live", "live", unique=True),
    Index("holdfast_replay_item_letter", "dlq_id", "plan_id"),
    Index("holdfast_replay_item_state_sent", "plan_id", "state", "position"),
    Index("holdfast_replay_item_key", "plan_id", "key_hash"),
)
"""One row per message of a plan, numbered in the order of sending. `live` holds the dead
letter's id while the claim lasts and nothing after: its uniqueness is the one live claim.
`seq` is the dead letter's number: by it a sender finds letters that lie together fast."""
