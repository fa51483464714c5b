"""The collector: dead letters move from broker topics into the store, and none is lost."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.imported import imported, is_foreign
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    Culprit,
    DeadLetter,
    Failure,
    History,
    Raised,
    Stage,
    dead_letter_id,
)
from holdfast.dlq.raised import clean
from holdfast.dlq.wire import ENVELOPE, from_topic
from holdfast.errors import DependencyDown, PoisonMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.dlq.store import StoreHome
    from holdfast.ports import Delivery, Source

log = logging.getLogger("holdfast.dlq")
_BATCH = 500
_POLL_SECONDS = 1.0


@dataclass(slots=True)
class Collected:
    """What a collector did so far."""

    stored: int = 0
    unreadable: int = 0
    """Messages without a readable envelope: stored all the same, as a group of their own."""


class Collector:
    """Stores each batch before it accepts it: a crash repeats, and a repeat changes nothing."""

    def __init__(
        self,
        source: Source,
        store: StoreHome,
        *,
        clock: Clock = SYSTEM_CLOCK,
        backoff: Backoff | None = None,
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._backoff = Backoff(first=0.2, ceiling=30) if backoff is None else backoff
        self._stop = threading.Event()
        self.collected = Collected()

    def run(
        self, *, until_idle: bool = False, progress: Callable[[Collected], object] | None = None
    ) -> Collected:
        """Collect until `stop`; or, with *until_idle*, until nothing is left.

        While broker or database is down it waits and asks again; *until_idle* gives up then.
        """
        failures = 0
        while not self._stop.is_set():
            try:
                batch = self._source.poll(_BATCH, _POLL_SECONDS)
                if batch:
                    self.collect(batch)
                elif until_idle and not any(self._source.lag().values()):
                    break
                failures = 0
            except DependencyDown as error:
                failures += 1
                if until_idle and failures > 3:
                    raise
                delay = self._backoff.delay(failures) or self._backoff.ceiling
                log.warning("nothing is collected for %.1f s: %s", delay, error)
                self._clock.wait(self._stop, delay)
            if progress is not None:
                progress(self.collected)
        self._source.flush()
        return self.collected

    def collect(self, batch: list[Delivery]) -> None:
        """Store *batch*, then accept it."""
        letters: dict[str, DeadLetter] = {}
        for delivery in batch:
            letter = self._letter(delivery)
            known = letters.get(letter.dlq_id)
            letters[letter.dlq_id] = letter if known is None else _later(known, letter)
        self._store.put_all(list(letters.values()))
        # Stored before accepted: a crash here collects the same letters again.
        self._source.accept(batch)
        self.collected.stored += len(batch)

    def stop(self) -> None:
        """End `run` after the batch in hand."""
        self._stop.set()
        self._source.wake()

    def _letter(self, delivery: Delivery) -> DeadLetter:
        try:
            return letter_in(delivery)
        except PoisonMessage as error:
            self.collected.unreadable += 1
            log.warning("message %s is stored without envelope: %s", delivery.position, error)
            return _unreadable(delivery, error)


def letter_in(delivery: Delivery) -> DeadLetter:
    """Return the letter that *delivery* of a dead-letter topic holds, whoever wrote it."""
    message = delivery.message
    if ENVELOPE not in message.headers and is_foreign(message):
        return imported(message)
    letter = from_topic(message)
    return msgspec.structs.replace(letter, origin="collected")


def _later(known: DeadLetter, letter: DeadLetter) -> DeadLetter:
    """Return the one letter of two failures of the same message in one batch."""
    first, last = sorted((known, letter), key=lambda one: one.history.last_failed_at)
    failures = {one.id: one for one in (*first.history.failures, *last.history.failures)}
    history = msgspec.structs.replace(
        last.history,
        first_failed_at=first.history.first_failed_at,
        failures=tuple(sorted(failures.values(), key=lambda one: one.at)),
        attempts=sum(one.attempts for one in failures.values()),
    )
    return msgspec.structs.replace(last, history=history)


def _unreadable(delivery: Delivery, error: PoisonMessage) -> DeadLetter:
    """Return a letter for what has no readable envelope: it is a message that nobody handled."""
    message = delivery.message
    group, handler = "unknown", "unknown"
    at = message.time.timestamp()
    return DeadLetter(
        dlq_id=dead_letter_id(group, handler, message),
        message=message,
        coordinates=Coordinates(
            topic=delivery.lane.topic, lane=delivery.lane.partition, position=delivery.position
        ),
        culprit=Culprit(group=group, handler=handler),
        failure=Failure(
            stage=Stage.DESERIALIZE,
            kind=Class.UNKNOWN,
            chain=(Raised(type="unreadable envelope", text=clean(str(error))[:500]),),
            explicit=f"unreadable envelope on {delivery.lane.topic}",
        ),
        history=History(first_failed_at=at, last_failed_at=at),
        origin="collected",
    )
