"""Counting what became of a plan's items."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import case, func, select

from holdfast.dlq.replay.plan import Plan, Tally
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import NOT_CLAIMED, ItemState

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_SENT, _OPEN = 0, 1  # parts of a plan: up to its sent mark, and from there; the rest was set aside


def tally(db: Connection, found: Plan) -> Tally:
    """Count the items of *found* by state.

    Claimed is what has no other state: those are counted, and the rest follows from the
    numbers, so that a plan of which nothing is confirmed yet costs nothing to look at.
    """
    part = case((item.c.position < found.sent, _SENT), (item.c.position < found.total, _OPEN))
    by_state = (
        select(item.c.state, part.label("part"), func.count())
        .where(item.c.plan_id == found.id, item.c.state.in_(NOT_CLAIMED))
        .group_by(item.c.state, part)
    )
    counts: Counter[ItemState] = Counter()
    waiting = {_SENT: found.sent, _OPEN: found.total - found.sent, None: 0}
    for state, where, count in db.execute(by_state):
        counts[ItemState(state)] += count
        waiting[where] -= count
    counts[ItemState.SENT], counts[ItemState.CLAIMED] = waiting[_SENT], waiting[_OPEN]
    return Tally(total=found.total, counts=+counts)


def again(plan_id: str) -> Any:
    """Return the query for the kinds of failure that came back."""
    return (
        select(item.c.again)
        .where(item.c.plan_id == plan_id, item.c.state == ItemState.FAILED_AGAIN)
        .distinct()
    )
