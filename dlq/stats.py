"""The figures at a glance: how many, since when, of what, and is the outflow keeping up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import case, func, literal, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.groups import DAY_HOURS, STATES, Groups, Which
from holdfast.dlq.rows import PENDING
from holdfast.dlq.schema import change, hour, message
from holdfast.dlq.tally import HOUR, OPENING

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_MOST_GROUPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One look at all dead letters."""

    pending: int
    parked: int
    confirmed: int
    discarded: int
    oldest_seconds: float | None
    """Age of the oldest pending message."""
    inflow: tuple[int, ...]
    """Messages that came in each of the last 24 hours, the current one last."""
    outflow: tuple[int, ...]
    """Messages that were closed in the same hours."""
    by_topic: dict[str, int]
    by_error: dict[str, int]
    by_class: dict[str, int]
    groups_by_state: dict[str, int]
    new_today: int
    """Groups first seen in the last 24 hours."""
    resolved_by: dict[str, int]
    """How closed messages were closed: replay (confirmed), discard, park."""
    due: int
    """Messages that wait for an automatic retry."""


def stats(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Stats:
    """Return the figures; on a million pending messages this takes well under a second."""
    now = clock.now().timestamp()
    groups = Groups(engine, clock=clock).figures(Which(states=STATES), limit=_MOST_GROUPS)
    with engine.connect() as db:
        inflow, outflow = flows(db, now)
        oldest = db.execute(
            select(func.min(message.c.stored_at)).where(message.c.state == PENDING)
        ).scalar()
        due = db.execute(
            select(func.count()).select_from(message).where(message.c.due_at.is_not(None))
        ).scalar_one()
    by_state = dict.fromkeys(STATES, 0)
    sums: dict[str, dict[str, int]] = {"topic": {}, "error": {}, "class": {}}
    for one in groups:
        by_state[one.state] += 1
        for name, key in (("topic", one.topic), ("error", one.error_type), ("class", one.kind)):
            if one.pending:
                sums[name][key] = sums[name].get(key, 0) + one.pending
    closed = {name: sum(getattr(one, name) for one in groups) for name in _CLOSED}
    return Stats(
        pending=sum(one.pending for one in groups),
        **closed,
        oldest_seconds=None if oldest is None else max(0.0, now - oldest),
        inflow=inflow,
        outflow=outflow,
        by_topic=_largest_first(sums["topic"]),
        by_error=_largest_first(sums["error"]),
        by_class=_largest_first(sums["class"]),
        groups_by_state=by_state,
        new_today=sum(one.first_seen >= now - 86400 for one in groups),
        resolved_by={
            "replay": closed["confirmed"],
            "discard": closed["discarded"],
            "park": closed["parked"],
        },
        due=due,
    )


_CLOSED = ("confirmed", "discarded", "parked")


def flows(db: Connection, now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return arrivals and closings of the last 24 hours, by hour, in one statement."""
    first = int(now // HOUR) - DAY_HOURS + 1
    folded = (
        select(hour.c.hour, func.sum(hour.c.arrived), func.sum(hour.c.closed))
        .where(hour.c.hour >= first)
        .group_by(hour.c.hour)
    )
    at: Any = func.floor(change.c.at / literal(float(HOUR)))
    opening = change.c.kind.in_(OPENING)
    fresh = (
        select(
            at,
            func.sum(case((opening, change.c.n), else_=0)),
            func.sum(case((opening, 0), else_=change.c.n)),
        )
        .where(change.c.at >= first * HOUR)
        .group_by(at)
    )
    came, went = [0] * DAY_HOURS, [0] * DAY_HOURS
    for when, arrived, closed in db.execute(folded.union_all(fresh)):
        place = int(when) - first
        if 0 <= place < DAY_HOURS:
            came[place] += int(arrived)
            went[place] += int(closed)
    return tuple(came), tuple(went)


def _largest_first(sums: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])))
