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
)

from holdfast.db.types import Document, name
from holdfast.dlq.store.schema import metadata

plan = Table(
    "holdfast_replay_plan",
    metadata,
    Column("id", name(36), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("reason", Document, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("high_water", BigInteger, nullable=False),
    Column("selection", Document, nullable=False),
    Column("policy", Document, nullable=False),
    Column("rate", Double),
    Column("target", String(255)),
    Column("fingerprints", Document, nullable=False),
    Column("transform", String(255)),
    Column("approval", Integer, nullable=False),
    Column("approved_by", String(255)),
    Column("approved_at", Double),
    Column("sent", BigInteger, nullable=False),
    Column("forgiven", BigInteger, nullable=False),
    Column("stopped_because", Document),
    Column("owner", String(255)),
    Column("epoch", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
    Column("ended_at", Double),
    Column("lanes", Integer),
    Index("holdfast_replay_plan_state", "state", "created_at"),
)
"""One row per plan. `sent` is the mark below which every item has been published; `owner`,
`epoch` and `until` (POSIX seconds, by the database's clock) are the lease of its sender. `lanes`
says into how many lanes it is divided; null: one sender sends all of it."""

item = Table(
    "holdfast_replay_item",
    metadata,
    Column("plan_id", name(36), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("dlq_id", name(36), nullable=False),
    Column("live", name(36)),
    Column("state", String(16), nullable=False),
    Column("key_hash", String(32), nullable=False),
    Column("fingerprint", String(64)),
    Column("again", String(64)),
    Column("note", Document),
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

lane = Table(
    "holdfast_replay_lane",
    metadata,
    Column("plan_id", name(36), primary_key=True),
    Column("stage", Integer, primary_key=True, autoincrement=False),
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("start", BigInteger, nullable=False),
    Column("beyond", BigInteger, nullable=False),
    Column("claimed", BigInteger, nullable=False),
    Column("sent", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
)
"""The ledger of a plan with lanes: one row per stage and lane, for the items from `start` up to
before `beyond`. Below `claimed` they are written down, below `sent` published. Who works on the
lane has the plan's `epoch` and the highest `attempt`; it gave a sign of life that is good `until`
then (POSIX seconds, by the database's clock)."""
