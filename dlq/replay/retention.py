"""Retention of plans: one that has ended goes after the last of its dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import delete, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit
from holdfast.db.transactions import committed
from holdfast.dlq.replay.plan import ENDED
from holdfast.dlq.replay.schema import item, lane, plan
from holdfast.dlq.store.schema import message

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator

_BATCH = 5_000


def prune_plans(
    engine: Engine, *, older_than: float, operator: Operator, clock: Clock = SYSTEM_CLOCK
) -> int:
    """Delete plans that ended more than *older_than* seconds ago; return how many.

    While a letter of it is kept, so is the plan: it is part of what happened to the letter.
    The audit trail keeps what was planned, by whom and why, and how it ended.
    """
    before = clock.now().timestamp() - older_than
    kept = (
        select(item.c.position)
        .join(message, message.c.dlq_id == item.c.dlq_id)
        .where(item.c.plan_id == plan.c.id)
    )
    over = select(plan.c.id).where(
        plan.c.state.in_([state.value for state in ENDED]),
        plan.c.ended_at < before,
        ~kept.exists(),
    )
    with engine.connect() as db:
        names = list(db.execute(over).scalars())
    for name in names:
        _delete(engine, name, operator, clock)
    return len(names)


def _delete(engine: Engine, name: str, operator: Operator, clock: Clock) -> None:
    """Delete a plan in short transactions, itself last."""

    def some(db: Connection) -> bool:
        first = db.execute(
            select(func.min(item.c.position)).where(item.c.plan_id == name)
        ).scalar_one()
        if first is None:
            db.execute(delete(lane).where(lane.c.plan_id == name))
            db.execute(delete(plan).where(plan.c.id == name))
            Audit(clock=clock).append(db, operator, "prune", f"plan {name}")
            return False
        below = item.c.position < first + _BATCH
        db.execute(delete(item).where(item.c.plan_id == name, below))
        return True

    while committed(engine, some, clock=clock):
        pass
