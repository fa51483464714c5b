"""What becomes of a message after an attempt: decided here alone, without I/O.

`outcome_of` says how an attempt ended, for everybody. `OutcomePolicy.next_step` says what the
scheduler is to do then; a loop of the user's own gives the `HandlerOutcome` to its broker instead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.classification import classify
from holdfast.consumer.parking.store import HandledElsewhere
from holdfast.consumer.scheduling.work import (
    ACK,
    Ack,
    Disposition,
    HandlerEnding,
    Release,
    RetryIn,
)
from holdfast.dlq.replay.admission import Withdrawn
from holdfast.errors import CircuitOpen, Remedy

if TYPE_CHECKING:
    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import Settings

_MOST_OUTAGES = 8  # in a row, for which the wait still grows


COUNTED = {
    HandlerEnding.HANDLED: "handled",
    HandlerEnding.DUPLICATE: "duplicates",
    HandlerEnding.DEAD_LETTERED: "dead_lettered",
    HandlerEnding.FAILED: "failed",
    HandlerEnding.RELEASED: "released",
    HandlerEnding.HELD_BACK: "held_back",
    HandlerEnding.SKIPPED: "skipped",
    HandlerEnding.WITHDRAWN: "withdrawn",
}
"""As what each ending is counted."""


@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """What to tell the broker: acknowledge, or give back, with or without blame."""

    ending: HandlerEnding
    error: BaseException | None = None

    @property
    def acknowledge(self) -> bool:
        """Whether the message is done with."""
        return self.ending not in (HandlerEnding.FAILED, HandlerEnding.RELEASED)

    @property
    def blame(self) -> bool:
        """Whether a message given back counts as a failed attempt."""
        return self.ending is HandlerEnding.FAILED


_HANDLED, _DUPLICATE = (
    HandlerOutcome(HandlerEnding.HANDLED),
    HandlerOutcome(HandlerEnding.DUPLICATE),
)


def ends_process(error: BaseException) -> bool:
    """Whether *error* of a handler is to stop the consumer, and counts as a crash.

    Signals reach the main thread, never a handler: this is the handler's own doing, and it
    would do so after each restart.
    """
    return not isinstance(error, Exception | asyncio.CancelledError)


def outcome_of(error: BaseException | None, *, dead: bool, duplicate: bool) -> HandlerOutcome:
    """Return how an attempt ended that raised *error*, or nothing.

    What is down, and what is in the hands of others, is not held against the message.
    """
    if error is None:
        if dead:
            return HandlerOutcome(HandlerEnding.DEAD_LETTERED)
        return _DUPLICATE if duplicate else _HANDLED
    if isinstance(error, Withdrawn):
        return HandlerOutcome(HandlerEnding.WITHDRAWN, error)
    is_released = classify(error) in (Remedy.PAUSE, Remedy.RELEASE)
    return HandlerOutcome(HandlerEnding.RELEASED if is_released else HandlerEnding.FAILED, error)


class OutcomePolicy:
    """Decides what is done with a message next. It keeps nothing and asks nobody."""

    def __init__(self, settings: Settings, *, has_store: bool) -> None:
        self._settings = settings
        self._parks = has_store and settings.parks
        self._has_store = has_store

    def next_step(self, work: Work, outcome: HandlerOutcome) -> Disposition:
        """Return what the scheduler is to do with *work* after *outcome*."""
        if outcome is _HANDLED or outcome is _DUPLICATE:
            return ACK  # as nearly every message
        match outcome.ending:
            case HandlerEnding.DEAD_LETTERED:
                return Ack(holds=self.holds_key(work))
            case HandlerEnding.FAILED:
                backoff = self._settings.backoff
                return RetryIn(backoff.delay(work.history.attempt) or backoff.ceiling)
            case HandlerEnding.RELEASED:
                return self._released(work, outcome.error)
        return ACK

    def holds_key(self, work: Work) -> bool:
        """Whether the later messages of the key of *work*, a dead letter now, wait for it."""
        return self._settings.quarantine and self._parks and work.key is not None

    def must_confirm(self, work: Work) -> bool:
        """Whether a store elsewhere is to hear that *work*, a replay, was handled."""
        return work.replay.confirmation_pending or (not self._has_store and work.message.is_replay)

    def is_long(self, work: Work, delay: float) -> bool:
        """Whether a wait of *delay* is not to be spent in memory.

        A parked replay would queue behind newer messages of its key, and be overtaken by the
        replays that follow it.
        """
        if work.message.is_replay or work.is_revoked:
            return False
        return self._settings.parks and delay > self._settings.patience

    def outage(self, outages: int) -> RetryIn:
        """Return the wait after the last of *outages* in a row."""
        delay = self._settings.backoff.delay(min(outages, _MOST_OUTAGES)) or 1.0
        return RetryIn(min(delay, self._settings.patience))

    def _released(self, work: Work, error: BaseException | None) -> Disposition:
        if error is not None and classify(error) is not Remedy.RELEASE:
            # The gate of its key knows when a circuit opens.
            gated = isinstance(error, CircuitOpen) and work.route.is_gated
            return RetryIn(0.0) if gated else self.outage(work.history.outages + 1)
        if work.is_revoked or isinstance(error, HandledElsewhere):
            return Release()
        asked: float | None = getattr(error, "retry_after", None)  # said by the error, if at all
        if asked is None:
            return self.outage(work.history.outages + 1)
        return RetryIn(min(asked, self._settings.patience))
