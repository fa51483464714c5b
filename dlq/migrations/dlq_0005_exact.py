"""Keep what a message says of itself whole, and find letters by their correlation.

A revision is frozen: it spells out its types instead of importing today's schema. Letters that
were stored before stay as they are: what was cut from them then is gone.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from holdfast.errors import ConfigurationError

revision = "dlq_0005"
down_revision = "dlq_0004"
branch_labels = None
depends_on = None

_TABLE = "holdfast_dlq_message"
_INDEX = "holdfast_dlq_message_correlation"
_Document = sa.Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")


def upgrade() -> None:
    """Add what is missing: `create_tables` may have made the tables of today."""
    offline = context.is_offline_mode()
    if offline or "exact" not in _names("columns"):
        op.add_column(_TABLE, sa.Column("exact", _Document))
    if offline or _INDEX not in _names("indexes"):
        op.create_index(_INDEX, _TABLE, ["correlation_id"])


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the dead-letter tables are not downgraded: an older version works with one column and "
        "one index more as well. Drop them by hand if they must go"
    )


def _names(what: str) -> set[str]:
    found = getattr(sa.inspect(op.get_bind()), f"get_{what}")(_TABLE)
    return {str(one["name"]) for one in found}
