"""Create the tables of replay plans.

A revision is frozen: it spells out its types instead of importing today's schema. Tables
that `create_tables` made before are kept, so a database can be adopted at any time.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0002"
down_revision = "dlq_0001"
branch_labels = None
depends_on = None

_ID = sa.String(36).with_variant(mysql.VARCHAR(36, collation="utf8mb4_bin"), "mysql", "mariadb")
_DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")


def upgrade() -> None:
    """Create what is missing."""
    _create(
        "holdfast_replay_plan",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("reason", _DOCUMENT, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("high_water", sa.BigInteger, nullable=False),
        sa.Column("selection", _DOCUMENT, nullable=False),
        sa.Column("policy", _DOCUMENT, nullable=False),
        sa.Column("rate", sa.Double),
        sa.Column("target", sa.String(255)),
        sa.Column("fingerprints", _DOCUMENT, nullable=False),
        sa.Column("transform", sa.String(255)),
        sa.Column("approval", sa.Integer, nullable=False),
        sa.Column("approved_by", sa.String(255)),
        sa.Column("approved_at", sa.Double),
        sa.Column("sent", sa.BigInteger, nullable=False),
        sa.Column("forgiven", sa.BigInteger, nullable=False),
        sa.Column("stopped_because", _DOCUMENT),
        sa.Column("owner", sa.String(255)),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
    )
    _index("holdfast_replay_plan_state", "holdfast_replay_plan", ["state", "created_at"])
    _create(
        "holdfast_replay_item",
        sa.Column("plan_id", _ID, primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("dlq_id", _ID, nullable=False),
        sa.Column("live", _ID),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("key_hash", sa.String(32), nullable=False),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("again", sa.String(64)),
        sa.Column("note", _DOCUMENT),
        sa.Column("settled_at", sa.Double),
    )
    _index("holdfast_replay_item_live", "holdfast_replay_item", ["live"], unique=True)
    _index("holdfast_replay_item_letter", "holdfast_replay_item", ["dlq_id", "plan_id"])
    _index("holdfast_replay_item_state", "holdfast_replay_item", ["plan_id", "state"])
    _index("holdfast_replay_item_key", "holdfast_replay_item", ["plan_id", "key_hash"])


def downgrade() -> None:
    """Refuse: the tables say what was replayed."""
    raise ConfigurationError(
        "the replay tables are not downgraded: they say what was sent and confirmed. Look with  "
        "holdfast dlq plans list , then drop them by hand"
    )


def _create(table: str, *columns: sa.Column[Any]) -> None:
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table(table):
        op.create_table(table, *columns)


def _index(name: str, table: str, columns: list[str], *, unique: bool = False) -> None:
    if not context.is_offline_mode():
        known = {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}
        if name in known:
            return
    op.create_index(name, table, columns, unique=unique)
