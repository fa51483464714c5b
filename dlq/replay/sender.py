"""The sender: publishes a plan in batches, fenced by its lease, and heeds what comes back.

Publish before marking: a crash sends what was in doubt again, two batches at most, which the
consumer's dedup absorbs, and never loses any. What is confirmed is never sent again.

One run of a sender: step by step through a plan, to its end or until somebody stops it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.text import MOST_TEXT, cut
from holdfast.db.transactions import committed
from holdfast.dlq.replay.batch_sender import SENDABLE, BatchSender
from holdfast.dlq.replay.lease import PlanLease
from holdfast.dlq.replay.plan import (
    ENDED,
    Await,
    Bucket,
    EndingKind,
    Finish,
    NotNow,
    PlanState,
    RunResult,
    Send,
    Stop,
    StopUnconfirmed,
    next_step,
)
from holdfast.dlq.replay.plans import tally
from holdfast.dlq.replay.progress import ProgressMonitor, plan_row
from holdfast.dlq.replay.publisher import PlanPublisher
from holdfast.dlq.replay.reading import AHEAD, LetterStream, PlanReader
from holdfast.dlq.replay.target import Target

if TYPE_CHECKING:
    import threading

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.progress import Observer
    from holdfast.ports import Broker


log = logging.getLogger("holdfast.dlq.replay")


class PlanRun(ABC):
    """Steps through a plan under its lease, to its end or until somebody stops it.

    What it means to send up to a gate is said by those who derive from it. Everything below
    `plan.sent` is published and marked so. At a gate nothing is on its way.
    """

    def __init__(
        self,
        lease: PlanLease,
        watch: ProgressMonitor,
        pace: Pace,
        stopping: threading.Event | None = None,
    ) -> None:
        self._lease = lease
        self._clock = lease.clock
        self._watch = watch
        self._pace = pace
        self._stopping = stopping
        self._plan: ReplayPlan

    @property
    def plan(self) -> ReplayPlan:
        """The plan as it was last read."""
        return self._plan

    def mark(self, sent: int | None = None) -> None:
        """Write that everything below *sent* is published, renew, and read the plan anew."""
        self._write() if sent is None else self._write(sent=sent)

    @abstractmethod
    def _ahead(self) -> int:
        """Return up to where messages were handed out, marked or not."""

    @abstractmethod
    def _send(self, until: int) -> None:
        """Send some of what lies before *until*, or all of it."""

    @abstractmethod
    def _land(self) -> None:
        """Return once nothing is on its way any more, and what was is marked."""

    def go(self, found: ReplayPlan) -> RunResult:
        """Step until the end."""
        self._plan = found
        self._write()  # what an operator did while the lease was waited for
        while self._plan.state in SENDABLE:
            if self._stopping is not None and self._stopping.is_set():
                self._land()
                return RunResult(EndingKind.PAUSED, self._plan.id, "its sender was asked to end")
            ahead = replace(self._plan, sent=self._ahead())
            match next_step(self._watch.look(ahead), self._plan.policy):
                case Send(until, state):
                    self._enter(state)
                    self._send(until)
                case Await(state):
                    self._enter(state)
                    self._pause(self._pace.poll_seconds)
                case Stop(reason):
                    self._land()
                    self._stop(reason)
                    return RunResult(EndingKind.STOPPED, self._plan.id, reason)
                case StopUnconfirmed(waiting):
                    text = f"{waiting:,} were sent and are not confirmed yet"
                    return RunResult(EndingKind.UNCONFIRMED, self._plan.id, text)
                case Finish():
                    return self._finish()
        self._land()
        return RunResult.interrupted(self._plan)

    def _stop(self, reason: str) -> None:
        """Stop the plan: a stop condition holds."""
        log.warning("plan %s stops: %s", self._plan.short, reason)
        self._write(only=SENDABLE, state=PlanState.STOPPED, stopped_because=cut(reason, MOST_TEXT))

    def _pause(self, seconds: float) -> None:
        """Wait, keep the lease, and hear what others ask of the plan."""
        self._clock.sleep(seconds)
        self._write()

    def _enter(self, state: PlanState) -> None:
        if self._plan.state is not state:
            self._write(only=SENDABLE, state=state)

    def _write(self, *, only: frozenset[PlanState] = frozenset(), **values: Any) -> None:
        """Write to the plan under our epoch, renew, and read what others wrote to it."""

        def work(db: Connection) -> ReplayPlan:
            self._lease.mark(db, states=only, **values)
            return plan_row(db, self._lease.plan_id)

        self._plan = committed(self._lease.engine, work, clock=self._clock)

    def _finish(self) -> RunResult:
        self._write(only=SENDABLE, state=PlanState.DONE, ended_at=self._clock.now().timestamp())
        if self._plan.state is not PlanState.DONE:
            return RunResult.interrupted(self._plan)
        with self._lease.engine.connect() as db:
            return RunResult.finished(self._plan, tally(db, self._plan))


class ReplayRun(PlanRun):
    """One run of a sender that publishes the whole plan itself, batch by batch."""

    def __init__(
        self,
        lease: PlanLease,
        publisher: PlanPublisher,
        target: Target,
        watch: ProgressMonitor,
        stream: LetterStream,
        pace: Pace,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(lease, watch, pace, stopping)
        self._batches = BatchSender(
            self, publisher, target, stream, lease.engine, clock=lease.clock, lease=lease.seconds
        )
        self._bucket: Bucket | None = None

    def go(self, found: ReplayPlan) -> RunResult:
        """Step until the end; when interrupted, mark what the broker still takes."""
        self._batches.handed = found.sent
        try:
            return super().go(found)
        except KeyboardInterrupt:
            self._batches.abandon(self._pace.lease_seconds)
            raise

    def _ahead(self) -> int:
        return self._batches.handed

    def _send(self, until: int) -> None:
        batches = self._batches
        if self._bucket is None or self._plan.rate != self._bucket.rate:
            self._bucket = Bucket(self._plan.rate, clock=self._clock)
        granted, wait = self._bucket.grant(
            min(until - batches.handed, batches.stream.fits(batches.handed))
        )
        if granted:
            batches.send(batches.handed + granted, until)
        else:
            batches.land()
            self._pause(min(wait, self._pace.poll_seconds))

    def _land(self) -> None:
        self._batches.land()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a sender works; the plan itself says what and how fast."""

    batch: int = 5000
    """Published at a time, less of large messages; after a crash at most two batches are sent
    again."""
    lease_seconds: float = 5.0
    poll_seconds: float = 0.2


def require_sendable(found: ReplayPlan) -> None:
    """Raise `NotNow` unless *found* is frozen, approved and not at its end."""
    if found.state in ENDED:
        raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")
    if found.state is PlanState.FREEZING:
        raise NotNow(f"plan {found.short} is being made: wait until it is frozen, or abort it")
    if found.waits_for_approval:
        raise NotNow(
            f"plan {found.short} of {found.total:,} messages waits for the approval of "
            f"somebody else than {found.created_by}: holdfast dlq plans approve {found.short}"
        )


class Sender:
    """Sends one plan from where it stands, until it ends or somebody stops it.

    When *stopping* is set it ends after the batch in hand; the plan waits for a next sender.
    """

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        *,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
        observe: Observer | None = None,
        vault: Vault | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._vault = vault
        self._stopping = stopping
        self._engine = engine
        self._broker = broker
        self._pace = Pace() if pace is None else pace
        self._clock = clock
        self._observe = observe

    def run(self, plan_id: str) -> RunResult:
        """Send the plan on; returns how it ended. One sender at a time, whoever calls."""
        with self._engine.connect() as db:
            found = plan_row(db, plan_id)
        require_sendable(found)
        if found.lanes:
            raise NotNow(
                f"plan {found.short} is divided into {found.lanes} lanes, and is sent by  "
                f"holdfast spark replay {found.short}"
            )
        seconds = self._pace.lease_seconds
        lease = PlanLease.take(self._engine, plan_id, seconds=seconds, clock=self._clock)
        sink = self._broker.sink()
        try:
            with (
                ThreadPoolExecutor(AHEAD, "holdfast-replay-read") as ahead,
                closing(PlanPublisher(sink, self._clock, meanwhile=seconds / 3)) as publisher,
            ):
                reader = PlanReader(found, self._vault)
                run = ReplayRun(
                    lease,
                    publisher,
                    Target(self._broker, found.target),
                    ProgressMonitor(self._engine, clock=self._clock, observe=self._observe),
                    LetterStream(self._engine, reader, ahead, batch=self._pace.batch),
                    self._pace,
                    self._stopping,
                )
                return run.go(found)
        finally:
            sink.close()
            lease.release()
