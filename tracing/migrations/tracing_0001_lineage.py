"""Create the table of lineage.

A revision is frozen: it spells out its types instead of importing today's schema. A table
that `create_tables` made before is kept, so a database can be adopted at any time.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "tracing_0001"
down_revision = None
branch_labels = ("tracing",)
depends_on = None

_SEQ = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAME = sa.String(255).with_variant(mysql.VARCHAR(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_WORD = sa.String(16).with_variant(mysql.VARCHAR(16, collation="ascii_bin"), "mysql", "mariadb")


def upgrade() -> None:
    """Create what is missing."""
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table("holdfast_lineage"):
        op.create_table(
            "holdfast_lineage",
            sa.Column("seq", _SEQ, primary_key=True),
            sa.Column("event_id", _NAME, nullable=False),
            sa.Column("type", _NAME, nullable=False),
            sa.Column("correlation_id", _NAME, nullable=False),
            sa.Column("causation_id", _NAME),
            sa.Column("source", _NAME, nullable=False),
            sa.Column("topic", _NAME, nullable=False),
            sa.Column("message_key", _NAME),
            sa.Column("time", sa.Double, nullable=False),
            sa.Column("outcome", _WORD, nullable=False),
            sa.Column("service", _NAME, nullable=False),
            sa.Column("error", sa.Text),
            sa.Column("at", sa.Double, nullable=False),
        )
    _index("holdfast_lineage_correlation", ["correlation_id"])
    _index("holdfast_lineage_event", ["event_id"])
    _index("holdfast_lineage_type", ["type", "seq"])


def downgrade() -> None:
    """Refuse: nobody else remembers how events came of each other."""
    raise ConfigurationError(
        "the table of lineage is not downgraded: what it knows is nowhere else. Drop "
        "holdfast_lineage by hand if nobody needs it"
    )


def _index(name: str, columns: list[str]) -> None:
    if not context.is_offline_mode():
        indexes = sa.inspect(op.get_bind()).get_indexes("holdfast_lineage")
        if any(index["name"] == name for index in indexes):
            return
    op.create_index(name, "holdfast_lineage", columns)
