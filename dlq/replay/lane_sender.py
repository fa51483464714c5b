"""Sending a plan by its lanes: each by one who holds its claim, all stepped by one who leads.

Who leads holds the lease of the plan, takes it from gate to gate, and heeds what consumers say,
exactly as a sender of a whole plan does. What sends the lanes up to a gate is given: threads, or
the tasks of a cluster. Each lane sees at every batch whether the plan was paused or aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.transactions import committed
from holdfast.dlq.replay.batch_sender import SENDABLE, BatchSender
from holdfast.dlq.replay.lanes import LEASE_SECONDS, LaneClaim, marks_of, shared_rate, watermark
from holdfast.dlq.replay.lease import PlanLease
from holdfast.dlq.replay.plan import Bucket, NotNow, PlanState, trouble
from holdfast.dlq.replay.progress import ProgressMonitor, plan_row
from holdfast.dlq.replay.publisher import PlanPublisher
from holdfast.dlq.replay.reading import AHEAD, LetterStream, PlanReader
from holdfast.dlq.replay.sender import Pace, PlanRun, require_sendable
from holdfast.dlq.replay.target import Target
from holdfast.errors import DependencyDown

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayPlan, RunResult
    from holdfast.dlq.replay.progress import Observer
    from holdfast.ports import Broker

log = logging.getLogger("holdfast.dlq.replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOrder:
    """What the lanes of a plan are to do now: send up to *gate*, as long as *epoch* holds."""

    plan_id: str
    lanes: int
    epoch: int
    gate: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneResult:
    """How far one lane came."""

    lane: int
    sent: int
    """Messages that it gave to the broker in this run."""
    outage: str | None = None
    """Why it gave up before its end: database or broker stayed away. The next run goes on."""


SendLanes = Callable[[LaneOrder], "Sequence[LaneResult]"]
"""Sends every lane of a plan up to a gate, and returns how far each came."""


class LaneSender:
    """Sends one lane up to a gate: whoever has a higher attempt number fences it off.

    After a crash at most one batch of the lane is sent again.
    """

    def __init__(
        self,
        claim: LaneClaim,
        broker: Broker,
        *,
        batch: int,
        vault: Vault | None = None,
    ) -> None:
        self._claim = claim
        self._clock = claim.clock
        self._broker = broker
        self._batch = batch
        self._vault = vault
        self._stage = 0
        self._plan: ReplayPlan
        self._bucket: Bucket | None = None

    @property
    def plan(self) -> ReplayPlan:
        """The plan as it was last read, with the lane's part of its rate."""
        return self._plan

    def mark(self, sent: int | None = None) -> None:
        """Write that everything below *sent* is published, and read the plan anew."""
        values = {} if sent is None else {"sent": sent}

        def work(db: Connection) -> ReplayPlan:
            self._claim.write(db, self._stage, **values)
            found = self._claim.check_plan(db)
            limited = found.rate.per_second is not None
            return shared_rate(found, self._claim.running(db) if limited else 1)

        self._plan = _patiently(self._claim, work, self._plan.policy.patience)

    def send(self, gate: int) -> int:
        """Send what the lane has before *gate*; return how many messages that were.

        It ends early when the plan is paused, stopped or aborted.
        """
        claim, count = self._claim, 0
        with claim.engine.connect() as db:
            self._plan = claim.check_plan(db)
            marks = [
                one for one in marks_of(db, claim.plan_id, claim.lane)
                if one.sent < min(one.beyond, gate, self._plan.total)
            ]  # fmt: skip
        if not marks:
            claim.release()
            return 0
        self._stage = marks[0].stage
        self.mark()
        if self._plan.rate.per_second is not None:
            # Those who send already learn of this lane at their next sign of life.
            self._clock.sleep(LEASE_SECONDS / 3)
            self.mark()
        sink = self._broker.sink()
        meanwhile = LEASE_SECONDS / 3
        try:
            with (
                ThreadPoolExecutor(AHEAD, "holdfast-lane-read") as ahead,
                closing(PlanPublisher(sink, self._clock, meanwhile=meanwhile)) as publisher,
            ):
                reader = PlanReader(self._plan, self._vault)
                batches = BatchSender(
                    self,
                    publisher,
                    Target(self._broker, self._plan.target),
                    LetterStream(claim.engine, reader, ahead, batch=self._batch),
                    claim.engine,
                    clock=self._clock,
                )
                for one in marks:
                    self._stage, batches.handed = one.stage, one.sent
                    self._send_stage(batches, min(one.beyond, gate))
                    count += batches.handed - one.sent
                    if self._plan.state not in SENDABLE:
                        break
        finally:
            sink.close()
        claim.release()
        return count

    def _send_stage(self, batches: BatchSender, until: int) -> None:
        while batches.handed < until and self._plan.state in SENDABLE:
            if self._bucket is None or self._bucket.rate != self._plan.rate:
                self._bucket = Bucket(self._plan.rate, clock=self._clock)
            granted, wait = self._bucket.grant(
                min(until - batches.handed, batches.stream.fits(batches.handed))
            )
            if granted:
                batches.send(batches.handed + granted, until)
            else:
                batches.land()
                batches.pause(min(wait, LEASE_SECONDS / 10))
        batches.land()


def _patiently(
    claim: LaneClaim, work: Callable[[Connection], ReplayPlan], patience: float
) -> ReplayPlan:
    """Commit *work* through an outage of the database, for as long as the plan is patient."""
    backoff, attempt = Backoff(first=0.2, ceiling=5.0), 1
    until = claim.clock.monotonic() + patience
    while True:
        try:
            return committed(claim.engine, work, clock=claim.clock)
        except DependencyDown as error:
            delay = backoff.delay(attempt) or 0.0
            if claim.clock.monotonic() + delay > until:
                raise
            log.warning("the database is away, the lane waits: %s", error)
            claim.clock.sleep(delay)
            attempt += 1


def send_lane(
    order: LaneOrder,
    number: int,
    engine: Engine,
    broker: Broker,
    *,
    attempt: int,
    vault: Vault | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> LaneResult:
    """Send lane *number* as *order* says, as that *attempt*.

    Raises `Fenced` if another attempt has the lane or another leader the plan. An outage that
    lasts longer than the plan is patient is told, not raised: to begin again would not help.
    """
    claim = LaneClaim.take(
        engine, order.plan_id, number, epoch=order.epoch, attempt=attempt, clock=clock
    )
    sender = LaneSender(claim, broker, batch=order.batch, vault=vault)
    try:
        return LaneResult(lane=number, sent=sender.send(order.gate))
    except DependencyDown as error:
        return LaneResult(lane=number, sent=0, outage=str(error))


class LanesUnfinished(DependencyDown):
    """Some lanes gave up: database or broker stayed away. The plan waits to be sent on."""


class LaneRun(PlanRun):
    """Leads one run of a plan with lanes: from gate to gate, heeding what comes back."""

    def __init__(
        self,
        lease: PlanLease,
        watch: ProgressMonitor,
        pace: Pace,
        send_lanes: SendLanes,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(lease, watch, pace, stopping)
        self._send_lanes = send_lanes

    def _ahead(self) -> int:
        return self._plan.sent

    def _land(self) -> None:
        """Nothing is on its way: the lanes have returned."""

    def _send(self, until: int) -> None:
        order = LaneOrder(
            plan_id=self._plan.id,
            lanes=self._plan.lanes or 1,
            epoch=self._lease.epoch,
            gate=until,
            batch=self._pace.batch,
        )
        with ThreadPoolExecutor(1, "holdfast-lanes") as threads:
            lanes = threads.submit(self._send_lanes, order)
            self._lead(lanes)
        self._to_watermark()
        outage = next((one for one in lanes.result() if one.outage is not None), None)
        if outage is not None and self._plan.state in SENDABLE:
            raise LanesUnfinished(
                f"lane {outage.lane} of plan {self._plan.short} gave up: {outage.outage}. What "
                "it had sent is marked; go on with  holdfast spark replay "
                f"{self._plan.short} --reason …"
            )

    def _lead(self, lanes: Future[Sequence[LaneResult]]) -> None:
        """Keep the lease and judge the outcomes until the lanes have returned.

        A stop, a pause or an abort is written to the plan: each lane sees it at its next batch.
        """
        down_since: float | None = None
        while not lanes.done():
            self._clock.sleep(self._pace.poll_seconds)
            try:
                self._to_watermark()
                if self._plan.state in SENDABLE and not self._is_asked_to_end():
                    reason = trouble(self._watch.look(self._plan), self._plan.policy)
                    if reason is not None:
                        self._stop(reason)
                down_since = None
            except DependencyDown:
                now = self._clock.monotonic()
                down_since = now if down_since is None else down_since
                if now - down_since > self._plan.policy.patience:
                    raise

    def _is_asked_to_end(self) -> bool:
        if self._stopping is None or not self._stopping.is_set():
            return False
        self._write(only=SENDABLE, state=PlanState.PAUSED)
        return True

    def _to_watermark(self) -> None:
        """Mark in the plan what all of its lanes have sent together."""
        with self._lease.engine.connect() as db:
            marks = marks_of(db, self._plan.id)
        self.mark(min(watermark(marks), self._plan.total))


class LanesSender:
    """Sends a plan with lanes from where it stands, until it ends or somebody stops it.

    One leader at a time: a second one is refused while the first lives, and fences it off, with
    all of its lanes, once it does not.
    """

    def __init__(
        self,
        engine: Engine,
        send_lanes: SendLanes,
        *,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observe: Observer | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._engine = engine
        self._send_lanes = send_lanes
        self._pace = Pace() if pace is None else pace
        self._clock = clock
        self._observe = observe
        self._stopping = stopping

    def run(self, plan_id: str) -> RunResult:
        """Send the plan on; returns how it ended."""
        with self._engine.connect() as db:
            found = plan_row(db, plan_id)
        require_sendable(found)
        if not found.lanes:
            raise NotNow(
                f"plan {found.short} has no lanes, one sender sends it:  holdfast dlq plans "
                f"resume {found.short}"
            )
        lease = PlanLease.take(
            self._engine, plan_id, seconds=self._pace.lease_seconds, clock=self._clock
        )
        try:
            watch = ProgressMonitor(self._engine, clock=self._clock, observe=self._observe)
            run = LaneRun(lease, watch, self._pace, self._send_lanes, self._stopping)
            return run.go(found)
        finally:
            lease.release()
