"""What was sent again and nobody has confirmed: how much, and for how long nothing moved.

Watching a plan: what the consumer said so far, counted not more often than it is worth.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.item_state import WAITING, ItemState
from holdfast.dlq.replay.plan import Counted, PlanCounts, ReplayPlan, gates
from holdfast.dlq.replay.plans import again, tally
from holdfast.dlq.replay.schema import item, plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine


@dataclass(slots=True, kw_only=True)
class Unconfirmed:
    """Asked now and then, it remembers since when each plan waits without any outcome."""

    clock: Clock = SYSTEM_CLOCK
    messages: int = 0
    seconds: float = 0.0
    _seen: dict[str, tuple[tuple[int, int], float]] = field(default_factory=dict)

    def sample(self, db: Connection) -> None:
        """Count what waits now, and for how long the longest waiting plan has not moved."""
        waiting = (
            select(plan.c.id, plan.c.sent, func.count())
            .join(item, item.c.plan_id == plan.c.id)
            .where(
                item.c.live.is_not(None), item.c.state.in_(WAITING), item.c.position < plan.c.sent
            )
            .group_by(plan.c.id, plan.c.sent)
        )
        now, before, self._seen = self.clock.monotonic(), self._seen, {}
        self.messages, self.seconds = 0, 0.0
        for plan_id, sent, count in db.execute(waiting):
            stand, since = before.get(plan_id, ((-1, -1), now))
            since = since if stand == (sent, count) else now
            self._seen[plan_id] = (sent, count), since
            self.messages += count
            self.seconds = max(self.seconds, now - since)


if TYPE_CHECKING:
    Observer = Callable[[ReplayPlan, PlanCounts], Any]

_Sample = tuple[float, int, int]  # when, confirmed, failed

_WINDOW = 60.0  # seconds over which the failure ratio is taken, more if little happens
_APART = 0.5  # seconds between two counts while sending


class ProgressMonitor:
    """Counts the outcomes of one plan; at a gate always, between gates now and then."""

    def __init__(
        self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK, observe: Observer | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._observe = observe
        # From nothing: what failed while no sender lived counts for the next one.
        self._samples: deque[_Sample] = deque([(clock.monotonic(), 0, 0)])
        self._changed_at = clock.monotonic()
        self._outcomes = -1
        self._sent = -1
        self._counted: Counted | None = None
        self._due = float("-inf")

    def look(self, found: ReplayPlan) -> Counted:
        """Return what is known now of *found*."""
        if (
            self._counted is None
            or found.sent in gates(found.total, found.policy)
            or self._clock.monotonic() >= self._due
        ):
            self._counted = self._count(found)
        return replace(self._counted, sent=found.sent)

    def _count(self, found: ReplayPlan) -> Counted:
        now = self._clock.monotonic()
        with self._engine.connect() as db:
            counts = tally(db, found)
            kinds = db.execute(again(found.id)).scalars().all()
        cost = self._clock.monotonic() - now
        self._due = now + max(_APART, 10 * cost)
        if self._observe is not None:
            self._observe(found, counts)
        confirmed = counts[ItemState.CONFIRMED]
        failed = counts[ItemState.FAILED_AGAIN] - found.forgiven
        if confirmed + failed != self._outcomes or found.sent != self._sent:
            self._outcomes, self._sent, self._changed_at = confirmed + failed, found.sent, now
        before = self._before(now, confirmed, failed, found.policy.least_outcomes)
        return Counted(
            total=found.total,
            sent=found.sent,
            confirmed=confirmed,
            failed=failed,
            aside=counts.aside,
            recent_confirmed=confirmed - before[1],
            recent_failed=failed - before[2],
            new_fingerprints=tuple(sorted({k for k in kinds if k} - set(found.fingerprints))),
            waiting_below_sent=counts[ItemState.SENT] + counts[ItemState.UNKNOWN],
            idle=now - self._changed_at,
        )

    def _before(self, now: float, confirmed: int, failed: int, least: int) -> _Sample:
        """Return the counts at the start of the window.

        It reaches back a minute, and further until it holds *least* outcomes: a slow plan is
        judged by as many as a fast one.
        """
        samples = self._samples
        if (confirmed, failed) != samples[-1][1:]:
            samples.append((now, confirmed, failed))
        while (
            len(samples) > 1
            and samples[1][0] < now - _WINDOW
            and confirmed + failed - sum(samples[1][1:]) >= least
        ):
            samples.popleft()
        return samples[0]


def plan_row(db: Connection, plan_id: str) -> ReplayPlan:
    """Return the plan as it stands."""
    return ReplayPlan.of(db.execute(_PLAN, {"plan": plan_id}).mappings().one())


_PLAN = select(plan).where(plan.c.id == bindparam("plan"))
