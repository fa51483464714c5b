"""Counting what became of a plan's items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from holdfast.dlq.replay.plan import Plan, Tally
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import ItemState

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection


def tally(db: Connection, found: Plan) -> Tally:
    """Count the items of *found* by state."""
    below = item.c.position < found.sent
    by_state = (
        select(item.c.state, below.label("below"), func.count())
        .where(item.c.plan_id == found.id)
        .group_by(item.c.state, below)
    )
    counts: dict[ItemState, int] = {}
    for state, is_sent, count in db.execute(by_state):
        shown = ItemState(state)
        if shown is ItemState.CLAIMED and is_sent:
            shown = ItemState.SENT
        counts[shown] = counts.get(shown, 0) + count
    return Tally(total=found.total, counts=counts)


def again(plan_id: str) -> Any:
    """Return the query for the kinds of failure that came back."""
    return (
        select(item.c.again)
        .where(item.c.plan_id == plan_id, item.c.state == ItemState.FAILED_AGAIN)
        .distinct()
    )
