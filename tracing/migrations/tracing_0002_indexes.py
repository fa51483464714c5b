"""Have fewer indexes on the table of lineage: every event that is written there pays for them.

Types are looked for near a number now, and an event that began its correlation is found by that.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "tracing_0002"
down_revision = "tracing_0001"
branch_labels = None
depends_on = None

_TABLE, _NEW = "holdfast_lineage", "holdfast_lineage_caused"
_OLD = ("holdfast_lineage_event", "holdfast_lineage_type")
_CAUSED = sa.text("event_id <> correlation_id")


def upgrade() -> None:
    """Create what is missing and drop what is too much; MariaDB indexes all rows or none."""
    known = set(_OLD) if context.is_offline_mode() else _indexes()
    if _NEW not in known:
        op.create_index(_NEW, _TABLE, ["event_id"], postgresql_where=_CAUSED, sqlite_where=_CAUSED)
    for name in _OLD:
        if name in known:
            op.drop_index(name, _TABLE)


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the table of lineage is not downgraded: an older version works with these indexes as "
        "well, though more slowly. Drop holdfast_lineage by hand if nobody needs it"
    )


def _indexes() -> set[str | None]:
    return {one["name"] for one in sa.inspect(op.get_bind()).get_indexes(_TABLE)}
