"""Remember how far streams have stored the partitions of dead-letter topics.

A revision is frozen: it spells out its types instead of importing today's schema.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0010"
down_revision = "dlq_0009"
branch_labels = None
depends_on = None

_TABLE = "holdfast_dlq_stream"


def _name(length: int) -> sa.String:
    own = mysql.VARCHAR(length, collation="utf8mb4_bin")
    return sa.String(length).with_variant(own, "mysql", "mariadb")


def upgrade() -> None:
    """Create the table unless `create_tables` has made it."""
    if not context.is_offline_mode() and sa.inspect(op.get_bind()).has_table(_TABLE):
        return
    op.create_table(
        _TABLE,
        sa.Column("name", _name(64), primary_key=True),
        sa.Column("topic", _name(255), primary_key=True),
        sa.Column("lane", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Refuse: without it a stream would store letters again."""
    raise ConfigurationError(
        "the table of streams is not downgraded: it says what is stored. Drop it by hand if it "
        "must go"
    )
