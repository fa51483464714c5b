"""The figures at a glance: how many, since when, of what, and is the outflow keeping up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import case, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.store.closing import fixed_by_hand
from holdfast.dlq.store.counters import HOUR, flows, snapshot, unfolded
from holdfast.dlq.store.groups import STATES, FailureGroups, GroupFilter
from holdfast.dlq.store.rows import PARKED, PENDING
from holdfast.dlq.store.schema import message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

MOST_COUNTED = 20_000
"""Parked messages and retries that are counted one by one: more of them would take too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One look at all dead letters."""

    pending: int
    parked: int
    """Messages that are parked now, for a person to decide; counted up to `MOST_COUNTED`."""
    confirmed: int
    """Messages whose effect is there: replayed and handled, or fixed by hand."""
    discarded: int
    oldest_seconds: float | None
    """Age of the oldest pending message."""
    inflow: tuple[int, ...]
    """Messages that came in each of the last 24 hours, the current one last."""
    outflow: tuple[int, ...]
    """Messages that were closed in the same hours."""
    inflow_per_hour: float
    """How fast they come: since the hour before the current one began."""
    outflow_per_hour: float
    """How fast they are closed, measured alike."""
    by_topic: dict[str, int]
    by_error: dict[str, int]
    by_class: dict[str, int]
    groups_by_state: dict[str, int]
    new_today: int
    """Groups first seen in the last 24 hours."""
    resolved_by: dict[str, int]
    """How closed messages were closed: replay (confirmed), discard, park, fix (by hand)."""
    due: int
    """Messages that wait for an automatic retry; counted up to `MOST_COUNTED`, the next first."""
    due_now: int = 0
    """Those of them whose time has come: `holdfast dlq replay --due` sends them."""


def stats(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Stats:
    """Return the figures; on a million pending messages this takes well under a second."""
    now = clock.now().timestamp()
    with snapshot(engine) as db:
        more = unfolded(db)
        groups = FailureGroups(engine, clock=clock).as_of(db, more, GroupFilter(states=STATES))
        inflow, outflow = flows(db, more, now)
        # Not min(): before the tables are analysed, PostgreSQL reads all of them for that.
        pending = select(message.c.stored_at).where(message.c.state == PENDING)
        oldest = db.execute(pending.order_by(message.c.stored_at).limit(1)).scalar()
        retries = select(message.c.due_at).where(message.c.due_at.is_not(None))
        next_ones = retries.order_by(message.c.due_at).limit(MOST_COUNTED).subquery()
        due, due_now = db.execute(
            select(
                func.count(), func.sum(case((next_ones.c.due_at <= now, 1), else_=0))
            ).select_from(next_ones)
        ).one()
        aside = select(message.c.stored_at).where(message.c.state == PARKED)
        aside = aside.order_by(message.c.stored_at).limit(MOST_COUNTED)
        parked = db.execute(select(func.count()).select_from(aside.subquery())).scalar_one()
        fixed = fixed_by_hand(db)
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
        parked=parked,
        confirmed=closed["confirmed"],
        discarded=closed["discarded"],
        oldest_seconds=None if oldest is None else max(0.0, now - oldest),
        inflow=inflow,
        outflow=outflow,
        inflow_per_hour=per_hour(inflow, now),
        outflow_per_hour=per_hour(outflow, now),
        by_topic=_largest_first(sums["topic"]),
        by_error=_largest_first(sums["error"]),
        by_class=_largest_first(sums["class"]),
        groups_by_state=by_state,
        new_today=sum(one.first_seen >= now - 86400 for one in groups),
        resolved_by={
            "replay": closed["confirmed"] - fixed,
            "discard": closed["discarded"],
            "park": closed["parked"],
            "fix": fixed,
        },
        due=due,
        due_now=int(due_now or 0),
    )


def per_hour(flow: Sequence[int], now: float) -> float:
    """Return how many an hour there were in the last two hours of *flow*, of which one goes on."""
    return sum(flow[-2:]) / (1 + now % HOUR / HOUR)


_CLOSED = ("confirmed", "discarded", "parked")


def _largest_first(sums: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])))
