"""Note which scopes of the inbox earlier versions have written, and since when they go on.

The rows themselves stay: their numbers follow from names that only the handlers know, so a
consumer takes its own over when it starts.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "idempotency_0002"
down_revision = "idempotency_0003"
branch_labels = None
depends_on = None

_TABLE = "holdfast_inbox_scope"


def upgrade() -> None:
    """Create what is missing."""
    there = not context.is_offline_mode() and sa.inspect(op.get_bind()).has_table(_TABLE)
    if not there:
        op.create_table(
            _TABLE,
            sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("carried_at", sa.Double, nullable=False),
        )


def downgrade() -> None:
    """Refuse: without the table messages would be handled a second time."""
    raise ConfigurationError(
        "the scopes of the inbox are not removed by a downgrade: what was handled would be handled "
        "again; drop the table by hand if you mean it"
    )
