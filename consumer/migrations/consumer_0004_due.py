"""Let due retries be found by their time first.

With the group in front, PostgreSQL took this index of a table that was never analysed for the
look at single keys too, and compared every held key of the group with each of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "consumer_0004"
down_revision = "consumer_0003"
branch_labels = None
depends_on = None

_TABLE, _INDEX = "holdfast_held_key", "holdfast_held_key_due"


def upgrade() -> None:
    """Turn the columns of the index round; one that is so already stays."""
    if not context.is_offline_mode() and _columns() == ["due", "grp"]:
        return
    op.drop_index(_INDEX, table_name=_TABLE)
    op.create_index(_INDEX, _TABLE, ["due", "grp"])


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the consumer's tables are not downgraded: an older version works with this index as "
        "well. Drop the tables by hand if they must go"
    )


def _columns() -> list[str | None]:
    found = sa.inspect(op.get_bind()).get_indexes(_TABLE)
    return next((one["column_names"] for one in found if one["name"] == _INDEX), [])
