"""Let the items of replay plans name their dead letters by number, and be counted by an index.

A revision is frozen: it spells out its types instead of importing today's schema. Plans that
are under way go on: their items get the numbers of their letters.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from holdfast.errors import ConfigurationError

revision = "dlq_0004"
down_revision = "dlq_0003"
branch_labels = None
depends_on = None

_TABLE = "holdfast_replay_item"
_OLD, _NEW = "holdfast_replay_item_state", "holdfast_replay_item_state_sent"


def upgrade() -> None:
    """Add what is missing: `create_tables` may have made the tables of today."""
    if context.is_offline_mode() or "seq" not in _columns():
        op.add_column(_TABLE, sa.Column("seq", sa.BigInteger))
    op.execute(_NUMBERED)
    known = {_OLD} if context.is_offline_mode() else _indexes()
    if _NEW not in known:
        op.create_index(_NEW, _TABLE, ["plan_id", "state", "position"])
    if _OLD in known:
        op.drop_index(_OLD, _TABLE)


def downgrade() -> None:
    """Refuse: nothing is gained by it."""
    raise ConfigurationError(
        "the replay tables are not downgraded: an older version works with one column and another "
        "index as well. Drop them by hand if they must go"
    )


_item = sa.table(_TABLE, sa.column("dlq_id"), sa.column("seq"))
_letter = sa.table("holdfast_dlq_message", sa.column("dlq_id"), sa.column("seq"))
_number = sa.select(_letter.c.seq).where(_letter.c.dlq_id == _item.c.dlq_id)
_NUMBERED = (
    sa.update(_item).where(_item.c.seq.is_(None)).values(seq=_number.scalar_subquery())
)  # also when it is run again after it broke off


def _columns() -> set[str]:
    return {column["name"] for column in sa.inspect(op.get_bind()).get_columns(_TABLE)}


def _indexes() -> set[str]:
    return {str(index["name"]) for index in sa.inspect(op.get_bind()).get_indexes(_TABLE)}
