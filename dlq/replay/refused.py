"""Messages of a plan that cannot be sent: set aside, with what follows of their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import bindparam, or_, select, update

from holdfast.columns import MOST_TEXT, cut
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import WAITING, ItemState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.clock import Clock
    from holdfast.dlq.replay.outgoing import Refusal
    from holdfast.dlq.replay.plan import Plan

_ROWS = 500  # per statement


def set_aside(db: Connection, plan: Plan, refused: Sequence[Refusal], clock: Clock) -> None:
    """Settle *refused* with the reasons; hold what the plan has of their keys after them.

    A commutative handler does not mind what follows.
    """
    now = clock.now().timestamp()
    skip = (
        update(item)
        .where(item.c.plan_id == plan.id, item.c.position == bindparam("number"))
        .values(state=bindparam("into"), live=None, note=bindparam("words"), settled_at=now)
    )
    db.execute(
        skip,
        [
            {"number": r.number, "into": r.state.value, "words": cut(r.words, MOST_TEXT)}
            for r in refused
        ],
    )
    stuck = [one for one in refused if one.holds]
    if plan.policy.commutative or not stuck:
        return
    hold = (
        update(item)
        .where(
            item.c.plan_id == plan.id,
            item.c.key_hash == bindparam("key"),
            item.c.position > bindparam("number"),
            or_(*(item.c.state == state for state in sorted(WAITING))),  # one statement for many
        )
        .values(state=ItemState.HELD, live=None, note=bindparam("words"), settled_at=now)
    )
    note = "an earlier message of its key was refused ({})"
    firsts = [
        {"key": key, "number": one.number, "words": note.format(one.dlq_id)}
        for key, one in _first_of_keys(db, plan.id, stuck).items()
    ]
    db.execute(hold, firsts)


def _first_of_keys(db: Connection, plan_id: str, refused: Sequence[Refusal]) -> dict[str, Refusal]:
    by_number = {one.number: one for one in refused}
    numbers = sorted(by_number)
    found: dict[str, Refusal] = {}
    for start in range(0, len(numbers), _ROWS):
        chosen = item.c.position.in_(numbers[start : start + _ROWS])
        query = select(item.c.position, item.c.key_hash).where(item.c.plan_id == plan_id, chosen)
        for number, key in db.execute(query.order_by(item.c.position)):
            found.setdefault(key, by_number[number])
    return found
