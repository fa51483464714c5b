"""Create the table of dead letters that a newer event of their key has overtaken.

A revision is frozen: it spells out its types instead of importing today's schema. A table
that `create_tables` made before is kept, so a database can be adopted at any time.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0003"
down_revision = "dlq_0002"
branch_labels = None
depends_on = None

_TABLE = "holdfast_dlq_overtaken"


def upgrade() -> None:
    """Create what is missing."""
    if not context.is_offline_mode() and sa.inspect(op.get_bind()).has_table(_TABLE):
        return
    op.create_table(
        _TABLE,
        sa.Column("dlq_id", _name(36), primary_key=True),
        sa.Column("message_id", _name(255), nullable=False),
        sa.Column("lane", sa.Integer),
        sa.Column("position", _name(64)),
        sa.Column("handled_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Refuse: the table keeps a replay from undoing what is newer."""
    raise ConfigurationError(
        "the table of overtaken dead letters is not downgraded: it keeps a replay from undoing "
        "what is newer. Replay or discard what is open, then drop it by hand"
    )


def _name(length: int) -> sa.String:
    return sa.String(length).with_variant(
        mysql.VARCHAR(length, collation="utf8mb4_bin"), "mysql", "mariadb"
    )
