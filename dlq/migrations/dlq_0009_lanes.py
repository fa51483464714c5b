"""Let a replay plan be divided into lanes, each with a mark of its own.

A revision is frozen: it spells out its types instead of importing today's schema.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0009"
down_revision = "dlq_0008"
branch_labels = None
depends_on = None

_PLAN, _LANE = "holdfast_replay_plan", "holdfast_replay_lane"
_ID = sa.String(36).with_variant(mysql.VARCHAR(36, collation="utf8mb4_bin"), "mysql", "mariadb")


def upgrade() -> None:
    """Add what is missing: `create_tables` may have made the tables of today."""
    offline = context.is_offline_mode()
    if offline or "lanes" not in _columns():
        op.add_column(_PLAN, sa.Column("lanes", sa.Integer))
    if offline or not sa.inspect(op.get_bind()).has_table(_LANE):
        op.create_table(
            _LANE,
            sa.Column("plan_id", _ID, primary_key=True),
            sa.Column("stage", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("lane", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("start", sa.BigInteger, nullable=False),
            sa.Column("beyond", sa.BigInteger, nullable=False),
            sa.Column("claimed", sa.BigInteger, nullable=False),
            sa.Column("sent", sa.BigInteger, nullable=False),
            sa.Column("epoch", sa.BigInteger, nullable=False),
            sa.Column("attempt", sa.BigInteger, nullable=False),
            sa.Column("until", sa.Double, nullable=False),
        )


def downgrade() -> None:
    """Refuse: the lanes say what was sent."""
    raise ConfigurationError(
        "the replay tables are not downgraded: they say what was sent and confirmed. Look with  "
        "holdfast dlq plans list , then drop them by hand"
    )


def _columns() -> set[str]:
    return {column["name"] for column in sa.inspect(op.get_bind()).get_columns(_PLAN)}
