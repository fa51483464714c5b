"""The lanes of a plan: its messages divided by key, so that many may send them at once.

All messages of a key are in one lane, in the order of their source. Every stage of the plan, that
is what lies between two of its gates, is divided over all lanes, so each lane of a stage is a
range of numbers with a mark of its own. Publish, then mark: after a crash one batch of a lane is
sent again at most, which the consumer's dedup absorbs.

Who works on a lane is told by two numbers: the epoch of the plan's lease, and the number of the
attempt. A higher pair takes the lane over, at once; what the one before writes is refused.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.transactions import committed
from holdfast.dlq.replay.lease import Fenced
from holdfast.dlq.replay.plan import Rate, gates
from holdfast.dlq.replay.progress import plan_row
from holdfast.dlq.replay.schema import lane
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.replay.plan import ReplayPlan, StopPolicy

MOST_LANES = 4096
LEASE_SECONDS = 5.0
"""For so long a sign of life of a lane is good."""


def lane_of(key_hash: str, lanes: int) -> int:
    """Return the lane of the messages with *key_hash*: the same on every machine."""
    return zlib.crc32(key_hash.encode()) % lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRange:
    """The messages of one lane in one stage: numbers *start* up to before *beyond*."""

    stage: int
    lane: int
    start: int
    beyond: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.beyond - self.start


def divided(
    policy: StopPolicy, canary: Sequence[int], rest: Sequence[int], aside: Sequence[int]
) -> list[LaneRange]:
    """Return the ranges of a plan, of which each lane has so many messages of each sort.

    The canary is the first stage, each ramp step another; every lane gives to a stage in
    proportion to what it has left. The last stage holds what is set aside: it is not sent.
    """
    total = sum(canary) + sum(rest)
    left, sizes = list(rest), []
    if sum(canary):
        sizes.append(list(canary))
    bounds = [gate for gate in gates(total, policy) if gate > sum(canary)]
    for before, gate in pairwise([sum(canary), *bounds]):
        share = _in_proportion(gate - before, left)
        left = [have - given for have, given in zip(left, share, strict=True)]
        sizes.append(share)
    sizes.append(list(aside))
    ranges, start = [], 0
    for stage, counts in enumerate(sizes):
        for number, count in enumerate(counts):
            ranges.append(LaneRange(stage=stage, lane=number, start=start, beyond=start + count))
            start += count
    return ranges


def _in_proportion(wanted: int, have: Sequence[int]) -> list[int]:
    """Return how *wanted* is divided over those who *have* so many, none giving more than that."""
    total = sum(have)
    if not total:
        return [0] * len(have)
    exact = [divmod(count * wanted, total) for count in have]
    given = [whole for whole, _ in exact]
    by_remainder = sorted(range(len(have)), key=lambda at: (-exact[at][1], at))
    for at in by_remainder[: wanted - sum(given)]:
        given[at] += 1
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMark:
    """One row of the ledger."""

    stage: int
    lane: int
    start: int
    beyond: int
    claimed: int
    sent: int


def marks_of(db: Connection, plan_id: str, number: int | None = None) -> list[LaneMark]:
    """Return the ledger of a plan, or of lane *number* of it, in the order of sending."""
    names = ("stage", "lane", "start", "beyond", "claimed", "sent")
    found = select(*(lane.c[name] for name in names)).where(lane.c.plan_id == plan_id)
    if number is not None:
        found = found.where(lane.c.lane == number)
    rows = db.execute(found.order_by(lane.c.stage, lane.c.lane)).mappings()
    return [LaneMark(**row) for row in rows]


def watermark(marks: Sequence[LaneMark]) -> int:
    """Return the number below which every message of the plan was published."""
    for one in marks:
        if one.sent < one.beyond:
            return one.sent
    return marks[-1].beyond if marks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneClaim:
    """The right to work on one lane of a plan, until somebody with a higher number comes."""

    engine: Engine
    plan_id: str
    lane: int
    epoch: int
    """Of the lease under which the plan is worked on."""
    attempt: int
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def take(
        cls,
        engine: Engine,
        plan_id: str,
        number: int,
        *,
        epoch: int,
        attempt: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LaneClaim:
        """Take the lane over from whoever had it; `Fenced` if a later attempt has it by now."""
        if attempt < 0 or epoch < 0:
            raise ConfigurationError(f"attempt {attempt} at epoch {epoch}: count from 0")
        claim = cls(engine=engine, plan_id=plan_id, lane=number, epoch=epoch, attempt=attempt,
                    clock=clock)  # fmt: skip
        committed(engine, claim._taken, clock=clock)
        return claim

    def _taken(self, db: Connection) -> None:
        older = or_(
            lane.c.epoch < self.epoch,
            and_(lane.c.epoch == self.epoch, lane.c.attempt <= self.attempt),
        )
        values = {"epoch": self.epoch, "attempt": self.attempt}
        mine = update(lane).where(self._rows(), older).values(**values, until=self._alive())
        if not db.execute(mine).rowcount:
            raise self._fenced()
        self.check_plan(db)

    def write(self, db: Connection, stage: int, **values: Any) -> None:
        """Write *values* to the lane's row of *stage*, and a sign of life; or raise `Fenced`.

        The row stays locked until the commit: what is written with it holds or is not there.
        """
        mine = and_(
            self._rows(),
            lane.c.stage == stage,
            lane.c.epoch == self.epoch,
            lane.c.attempt == self.attempt,
        )
        changed = update(lane).where(mine).values(**values, until=self._alive())
        if not db.execute(changed).rowcount:
            raise self._fenced()

    def check_plan(self, db: Connection) -> ReplayPlan:
        """Return the plan; `Fenced` if somebody else works on it now."""
        found = plan_row(db, self.plan_id)
        if found.epoch != self.epoch:
            raise self._fenced()
        return found

    def running(self, db: Connection) -> int:
        """Return how many lanes are being sent at this moment, this one among them."""
        alive = and_(lane.c.plan_id == self.plan_id, lane.c.until > database_now())
        count = select(func.count(func.distinct(lane.c.lane))).where(alive)
        return max(1, db.execute(count).scalar_one())

    def release(self) -> None:
        """Say that nobody works on the lane, so that the others may go faster."""
        mine = and_(self._rows(), lane.c.epoch == self.epoch, lane.c.attempt == self.attempt)

        def work(db: Connection) -> None:
            db.execute(update(lane).where(mine).values(until=0.0))

        committed(self.engine, work, clock=self.clock)

    def _rows(self) -> ColumnElement[bool]:
        return and_(lane.c.plan_id == self.plan_id, lane.c.lane == self.lane)

    def _alive(self) -> Any:
        return database_now() + LEASE_SECONDS

    def _fenced(self) -> Fenced:
        return Fenced(
            f"another attempt works on lane {self.lane} of plan {self.plan_id[-8:]}: this one is "
            f"attempt {self.attempt} at epoch {self.epoch}"
        )


def shared_rate(found: ReplayPlan, running: int) -> ReplayPlan:
    """Return *found* with the part of its rate that one of *running* lanes may send at."""
    rate = found.rate
    if rate.per_second is None:
        return found
    return replace(found, rate=Rate(rate.per_second / running))
