"""Keep with a parked message what a dead letter of it must hide.

A revision is frozen: it spells out its types instead of importing today's schema. Messages that
are parked already have no rules: nobody knows what a dead letter of them must hide.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "consumer_0005"
down_revision = "consumer_0004"
branch_labels = None
depends_on = None

_TABLE, _COLUMN = "holdfast_held", "rules"
_Document = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")


def upgrade() -> None:
    """Add the column where it is missing: `create_tables` may have made the tables of today."""
    if context.is_offline_mode() or _COLUMN not in _columns():
        op.add_column(_TABLE, sa.Column(_COLUMN, _Document))


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the consumer's tables are not downgraded: an older version works with one column more as "
        "well. Drop the tables by hand if they must go"
    )


def _columns() -> set[str]:
    return {str(one["name"]) for one in sa.inspect(op.get_bind()).get_columns(_TABLE)}
