"""One run of a sender: step by step through a plan, to its end or until somebody stops it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.columns import MOST_TEXT, cut
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.ending import Ending, EndingKind
from holdfast.dlq.replay.flight import failures
from holdfast.dlq.replay.outgoing import Batch, Refusal
from holdfast.dlq.replay.rate import Bucket
from holdfast.dlq.replay.refused import set_aside
from holdfast.dlq.replay.state import ACTIVE, PlanState
from holdfast.dlq.replay.steps import Await, Finish, Send, Stop, Unconfirmed, next_step
from holdfast.dlq.replay.tallying import tally
from holdfast.dlq.replay.watch import Watch, plan_row
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.flight import Publisher
    from holdfast.dlq.replay.lease import Lease
    from holdfast.dlq.replay.plan import Plan
    from holdfast.dlq.replay.sender import Pace
    from holdfast.dlq.replay.stream import Stream
    from holdfast.dlq.replay.target import Target

log = logging.getLogger("holdfast.dlq.replay")

_AGAIN = 0.1  # seconds before what was put off is sent once more
_SENDABLE = ACTIVE | {PlanState.DRAFT}


class Run:
    """One run of a sender.

    Everything below `plan.sent` is published and marked so; from there up to `_handed` a
    batch may be on its way. At a gate nothing is.
    """

    def __init__(
        self,
        lease: Lease,
        publisher: Publisher,
        target: Target,
        watch: Watch,
        stream: Stream,
        stopping: threading.Event | None = None,
    ) -> None:
        self._stopping = stopping
        self._lease = lease
        self._clock = lease.clock
        self._publisher = publisher
        self._target = target
        self._watch = watch
        self._stream = stream
        self._plan: Plan
        self._handed = 0

    def go(self, found: Plan, pace: Pace) -> Ending:
        """Step until the end."""
        self._plan, self._handed = found, found.sent
        try:
            return self._go(pace)
        except KeyboardInterrupt:
            taken = self._publisher.abandon(pace.lease_seconds)
            if taken is not None:
                self._mark(sent=taken.end)
            raise

    def _go(self, pace: Pace) -> Ending:
        self._mark()  # what an operator did while the lease was waited for
        bucket = Bucket(self._plan.rate, clock=self._clock)
        while self._plan.state in _SENDABLE:
            if self._plan.rate != bucket.rate:
                bucket = Bucket(self._plan.rate, clock=self._clock)
            if self._stopping is not None and self._stopping.is_set():
                self._land()
                return Ending(EndingKind.PAUSED, self._plan.id, "its sender was asked to end")
            ahead = replace(self._plan, sent=self._handed)
            match next_step(self._watch.look(ahead), self._plan.policy):
                case Send(until, state):
                    self._enter(state)
                    granted, wait = bucket.grant(
                        min(until - self._handed, self._stream.fits(self._handed))
                    )
                    if granted:
                        self._send(self._handed + granted, until)
                    else:
                        self._land()
                        self._pause(min(wait, pace.poll_seconds))
                case Await(state):
                    self._enter(state)
                    self._pause(pace.poll_seconds)
                case Stop(reason):
                    log.warning("plan %s stops: %s", self._plan.short, reason)
                    self._land()
                    self._mark(
                        only=_SENDABLE,
                        state=PlanState.STOPPED,
                        stopped_because=cut(reason, MOST_TEXT),
                    )
                    return Ending(EndingKind.STOPPED, self._plan.id, reason)
                case Unconfirmed(waiting):
                    text = f"{waiting:,} were sent and are not confirmed yet"
                    return Ending(EndingKind.UNCONFIRMED, self._plan.id, text)
                case Finish():
                    return self._finish()
        self._land()
        return Ending.interrupted(self._plan)

    def _send(self, end: int, until: int) -> None:
        """Publish up to *end*; the batch before it is marked while this one is on its way."""
        batch = self._fit(self._stream.read(self._handed, end, self._mark))
        self._target.prepare(batch.places)
        if self._plan.rate.per_second is None:
            self._stream.read_ahead(end, until)
        landed, is_whole = self._landed()
        if self._plan.state in _SENDABLE:  # else the batch before may not have gone either
            self._publisher.send(batch if is_whole else self._stream.current(batch))
            self._handed = end
        if landed is not None:
            # Published, then marked: between the two a crash duplicates, and never loses.
            self._mark(sent=landed)
        if end == until:
            self._land()

    def _land(self) -> None:
        """Wait for what is on its way, and mark it."""
        landed, _ = self._landed()
        if landed is not None:
            self._mark(sent=landed)

    def _landed(self) -> tuple[int | None, bool]:
        """Wait for what is on its way: where it ends, and whether the broker took all of it.

        What it refused is set aside, with what follows of its keys, when this returns. What it
        only did not take because of another message is sent again, for as long as the plan is
        patient.
        """
        is_whole, until = True, self._clock.monotonic() + self._plan.policy.patience
        while True:
            found = self._publisher.land(
                patience=self._plan.policy.patience,
                pause=self._pause,
                current=self._stream.current,
                goes_on=lambda: self._plan.state in _SENDABLE,
            )
            if found is None:
                return None, True
            batch, results = found
            refused: list[Refusal] = []
            left: dict[int, Transient] = {}
            for index, error in failures(results):
                if isinstance(error, ConfigurationError):
                    raise error
                if isinstance(error, Transient):
                    left[batch.numbers[index]] = error
                else:
                    refused.append(Refusal(batch.numbers[index], batch.ids[index], str(error)))
            METRICS.replayed.labels("sent").inc(len(results) - len(refused) - len(left))
            if refused:
                log.warning("the broker refused %d messages of plan %s",
                            len(refused), self._plan.short)  # fmt: skip
                self._set_aside(refused)
                is_whole = False
            if not left:
                return batch.end, is_whole
            if self._clock.monotonic() > until:
                raise next(iter(left.values()))
            self._pause(_AGAIN)
            if self._plan.state not in _SENDABLE:
                return None, True
            sent = {number for number in batch.numbers if number not in left}
            self._publisher.send(self._stream.current(batch.without(sent)))

    def _fit(self, batch: Batch) -> Batch:
        """Set aside what cannot be sent as it was, and what follows of its key; return the rest."""
        if not batch.unfit:
            return batch
        log.warning("%d messages of plan %s are set aside, the first because %s",
                    len(batch.unfit), self._plan.short, batch.unfit[0].words)  # fmt: skip
        self._set_aside(batch.unfit)
        return self._stream.current(batch)

    def _set_aside(self, refused: Sequence[Refusal]) -> None:
        self._committed(lambda db: set_aside(db, self._plan, refused, self._clock))

    def _pause(self, seconds: float) -> None:
        """Wait, keep the lease, and hear what others ask of the plan."""
        self._clock.sleep(seconds)
        self._mark()

    def _enter(self, state: PlanState) -> None:
        if self._plan.state is not state:
            self._mark(only=_SENDABLE, state=state)

    def _mark(self, *, only: frozenset[PlanState] = frozenset(), **values: Any) -> None:
        """Write to the plan under our epoch, renew, and read what others wrote to it."""

        def work(db: Connection) -> Plan:
            self._lease.mark(db, states=only, **values)
            return plan_row(db, self._lease.plan_id)

        self._plan = self._committed(work)

    def _committed(self, work: Any) -> Any:
        return committed(self._lease.engine, work, clock=self._clock)

    def _finish(self) -> Ending:
        self._mark(only=_SENDABLE, state=PlanState.DONE, ended_at=self._clock.now().timestamp())
        if self._plan.state is not PlanState.DONE:
            return Ending.interrupted(self._plan)
        with self._lease.engine.connect() as db:
            return Ending.finished(self._plan, tally(db, self._plan))
