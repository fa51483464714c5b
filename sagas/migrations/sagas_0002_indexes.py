"""Let sagas be found by their key alone, and the overdue ones without those that have ended.

A saga that ends has no deadline any more, so that the index of deadlines holds the running ones.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "sagas_0002"
down_revision = "sagas_0001"
branch_labels = None
depends_on = None

_TABLE, _KEY, _DEADLINE = "holdfast_saga", "holdfast_saga_key", "holdfast_saga_deadline"


def upgrade() -> None:
    """Turn the columns of one index round and add the other; what is so already stays."""
    if _columns(_KEY) != ["business_key", "type"]:
        op.drop_index(_KEY, table_name=_TABLE)
        op.create_index(_KEY, _TABLE, ["business_key", "type"])
    if not _columns(_DEADLINE):
        op.execute("UPDATE holdfast_saga SET deadline_at = NULL WHERE active_key IS NULL")
        op.create_index(_DEADLINE, _TABLE, ["deadline_at"])


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the tables of sagas are not downgraded: an older version works with these indexes as "
        "well. Drop the tables by hand if they must go"
    )


def _columns(index: str) -> list[str | None]:
    if context.is_offline_mode():
        return []
    found = sa.inspect(op.get_bind()).get_indexes(_TABLE)
    return next((one["column_names"] for one in found if one["name"] == index), [])
