"""Sibling analysis: many messages of a type failing at once point to a dependency, one to data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sqlalchemy import case, func, select

from holdfast.dlq.group import newest
from holdfast.dlq.schema import group, message

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

MANY = 10
"""Failures of different keys within the window from which on data is an unlikely cause."""
WINDOW = 300.0
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What failed near a problem, and what that says."""

    same: int
    """Messages of the group within the window."""
    keys: int
    """Different keys among them."""
    others: int
    """Messages of the same topic and consumer that failed in other ways."""
    verdict: Literal["dependency", "data", "unclear"]
    why: str


def look_around(
    db: Connection, group_id: str, *, window: float = WINDOW, handled: int | None = None
) -> Around:
    """Judge the group by what failed beside it in the *window* seconds before its last failure.

    Looked at are the messages that the store received up to the newest of the group, 10,000
    at most, so that it takes no longer among a million. *handled* is how many messages of the
    topic succeeded meanwhile, if the caller knows.
    """
    own = select(group.c.consumer_group, group.c.topic).where(group.c.group_id == group_id)
    who, last = db.execute(own).first(), newest(db, group_id)
    if who is None or last is None:
        return judged(same=0, keys=0, others=0, handled=handled)
    near = (
        select(  # what has no key is on its own
            message.c.group_id,
            func.coalesce(message.c.key_hash, message.c.dlq_id).label("key"),
            message.c.last_failed_at,
        )
        .where(
            message.c.seq.between(last - _MOST, last),
            message.c.consumer_group == who.consumer_group,
            message.c.topic == who.topic,
        )
        .subquery()
    )
    is_own = near.c.group_id == group_id
    until = select(func.max(near.c.last_failed_at)).where(is_own).scalar_subquery()
    row = db.execute(
        select(
            func.sum(case((is_own, 1), else_=0)),
            func.count(func.distinct(case((is_own, near.c.key)))),
            func.sum(case((is_own, 0), else_=1)),
        ).where(near.c.last_failed_at.between(until - window, until))
    ).one()
    return judged(same=int(row[0] or 0), keys=int(row[1]), others=int(row[2] or 0), handled=handled)


def judged(*, same: int, keys: int, others: int, handled: int | None = None) -> Around:
    """Return what the numbers say."""
    failed = same + others
    if keys >= MANY and (handled is None or failed > handled):
        why = f"{same} messages of {keys} keys failed alike at once"
        return _around("dependency", why, same, keys, others)
    if same and keys <= 1 and (others == 0 or (handled or 0) > failed):
        passed = "" if handled is None else f" while {handled} passed"
        return _around("data", f"one key alone failed like this{passed}", same, keys, others)
    why = f"{same} messages of {keys} keys failed alike, {others} in other ways"
    return _around("unclear", why, same, keys, others)


def _around(
    verdict: Literal["dependency", "data", "unclear"], why: str, same: int, keys: int, others: int
) -> Around:
    return Around(same=same, keys=keys, others=others, verdict=verdict, why=why)
