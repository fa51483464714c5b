"""Sending the batches of a plan: one is on its way, another waits behind it, more are read.

What cannot be sent, or the broker refuses, is set aside with what follows of its keys. Whoever
sends says where the mark is kept: with the plan, or with one lane of it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.db.transactions import committed
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.outcomes import set_aside
from holdfast.dlq.replay.plan import ACTIVE, PlanState
from holdfast.dlq.replay.reading import ReplayRefusal
from holdfast.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.publisher import PlanPublisher
    from holdfast.dlq.replay.reading import LetterStream, ReplayBatch
    from holdfast.dlq.replay.target import Target

log = logging.getLogger("holdfast.dlq.replay")

_AGAIN = 0.1  # seconds before what was put off is sent once more
SENDABLE = ACTIVE | {PlanState.DRAFT}
"""The states of a plan in which messages of it go out."""


class SendMark(Protocol):
    """Where it is written down what was published, under the right to send."""

    @property
    def plan(self) -> ReplayPlan:
        """The plan as it was last read."""

    def mark(self, sent: int | None = None) -> None:
        """Write that everything below *sent* is published, keep the right, read the plan anew.

        Raises `Fenced` when another has taken over: then nothing more may be sent.
        """


class BatchSender:
    """Publishes batch after batch; what has landed is marked, and never the other way round.

    With a *lease*, the seconds for which a mark gives the right to send, the next batch follows
    as soon as one was taken whole, and that one is marked meanwhile: a crash repeats two batches
    at most. Without, each is marked before the next one goes: a crash repeats one.
    """

    def __init__(
        self,
        mark: SendMark,
        publisher: PlanPublisher,
        target: Target,
        stream: LetterStream,
        engine: Engine,
        *,
        clock: Clock,
        lease: float | None = None,
    ) -> None:
        self.handed = 0
        """Up to here batches were given to the publisher; the last may be on its way."""
        self.stream = stream
        self._mark = mark
        self._publisher = publisher
        self._target = target
        self._engine = engine
        self._clock = clock
        self._lease = lease
        self._until = -math.inf
        """Until then the last mark gives the right to begin with a batch."""

    def send(self, end: int, until: int) -> None:
        """Publish up to *end*, of what may be sent up to *until*."""
        batch = self._fit(self.stream.read(self.handed, end, self._renew))
        if self._mark.plan.rate.per_second is None:
            self.stream.read_ahead(end, until)
        self._target.prepare(batch.places)
        if self._publisher.is_busy and self._clock.monotonic() < self._until:
            # All that went before the one on its way is marked: so two batches are in doubt.
            self._publisher.follow(batch, self._until)
        is_whole = self._settle()
        if self._publisher.is_busy:
            self.handed = end
        elif self._mark.plan.state in SENDABLE:  # else the one before may not have gone either
            self._publisher.send(batch if is_whole else self.stream.current(batch))
            self.handed = end
        if end == until:
            self.land()

    def land(self) -> None:
        """Wait for what is on its way, and mark it."""
        while self._publisher.is_busy:
            self._settle()

    def _settle(self) -> bool:
        """Wait for the batch on its way and mark it; whether the broker took all of it."""
        landed, is_whole = self._landed()
        if landed is not None:
            # Published, then marked: between the two a crash duplicates, and never loses.
            self._renew(landed)
        return is_whole

    def pause(self, seconds: float) -> None:
        """Wait, keep the right to send, and hear what others ask of the plan."""
        self._clock.sleep(seconds)
        self._renew()

    def _renew(self, sent: int | None = None) -> None:
        """Mark as `SendMark` does; what waits is not begun if the plan must not go on."""
        at = self._clock.monotonic()
        self._mark.mark(sent)
        if self._lease is not None:
            self._until = at + self._lease
        if self._mark.plan.state not in SENDABLE:
            self._publisher.withdraw()

    def abandon(self, seconds: float) -> None:
        """Mark what is on its way if the broker takes all of it within *seconds*."""
        taken = self._publisher.abandon(seconds)
        if taken is not None:
            self._mark.mark(taken.end)

    def _landed(self) -> tuple[int | None, bool]:
        """Wait for what is on its way: where it ends, and whether the broker took all of it.

        What it refused is set aside, with what follows of its keys, when this returns. What it
        only did not take because of another message is sent again, for as long as the plan is
        patient.
        """
        patience = self._mark.plan.policy.patience
        is_whole, until = True, self._clock.monotonic() + patience
        while True:
            found = self._publisher.land(
                patience=patience,
                pause=self.pause,
                current=self.stream.current,
                goes_on=lambda: self._mark.plan.state in SENDABLE,
            )
            if found is None:
                return None, True
            batch, failed = found
            refused: list[ReplayRefusal] = []
            left: dict[int, Transient] = {}
            for index, error in failed:
                number, dlq_id = batch.messages.number_of(index)
                if isinstance(error, ConfigurationError):
                    raise error
                if isinstance(error, Transient):
                    left[number] = error
                else:
                    refused.append(ReplayRefusal(number, dlq_id, str(error)))
            METRICS.replayed.labels("sent").inc(len(batch.messages) - len(failed))
            if refused:
                log.warning("the broker refused %d messages of plan %s",
                            len(refused), self._mark.plan.short)  # fmt: skip
                self._set_aside(refused)
                is_whole = False
            if not left:
                return batch.end, is_whole
            if self._clock.monotonic() > until:
                raise next(iter(left.values()))
            self.pause(_AGAIN)
            if self._mark.plan.state not in SENDABLE:
                return None, True
            sent = {number for number in batch.messages.numbers if number not in left}
            self._publisher.send(self.stream.current(batch.without(sent)))

    def _fit(self, batch: ReplayBatch) -> ReplayBatch:
        """Set aside what cannot be sent as it was, and what follows of its key; return the rest."""
        if not batch.unfit:
            return batch
        log.warning("%d messages of plan %s are set aside, the first because %s",
                    len(batch.unfit), self._mark.plan.short, batch.unfit[0].words)  # fmt: skip
        self._set_aside(batch.unfit)
        return self.stream.current(batch)

    def _set_aside(self, refused: Sequence[ReplayRefusal]) -> None:
        def work(db: Connection) -> Any:
            set_aside(db, self._mark.plan, refused, self._clock)

        committed(self._engine, work, clock=self._clock)
