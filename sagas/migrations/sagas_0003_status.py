"""Let transitions touch no index: the one of statuses goes by id instead of by the last change.

On PostgreSQL pages of sagas keep room for new versions of their rows; those that are full already
stay as they are until the table is written anew.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "sagas_0003"
down_revision = "sagas_0002"
branch_labels = None
depends_on = None

_TABLE, _STATUS = "holdfast_saga", "holdfast_saga_status"


def upgrade() -> None:
    """Make the index anew unless it is so already."""
    if _columns() != ["status", "id"]:
        op.drop_index(_STATUS, table_name=_TABLE)
        op.create_index(_STATUS, _TABLE, ["status", "id"])
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE holdfast_saga SET (fillfactor = 70)")


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the tables of sagas are not downgraded: an older version works with these indexes as "
        "well. Drop the tables by hand if they must go"
    )


def _columns() -> list[str | None]:
    if context.is_offline_mode():
        return []
    found = sa.inspect(op.get_bind()).get_indexes(_TABLE)
    return next((one["column_names"] for one in found if one["name"] == _STATUS), [])
