"""The collector: dead letters move from broker topics into the store, and none is lost.

Dead letters that wait on broker topics and are in no store yet: the broker may forget them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import TooLarge, is_about_data
from holdfast.dlq.letter import (
    Class,
    Coordinates,
    DeadLetter,
    ExceptionInfo,
    FailedConsumer,
    Failure,
    FailureStage,
    LetterHistory,
    Occurrence,
    dead_letter_id,
)
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.outcomes import enter, report_in
from holdfast.dlq.topic.foreign import imported, is_foreign
from holdfast.dlq.topic.topic import COLLECTOR, ENVELOPE, from_topic
from holdfast.errors import DependencyDown, PoisonMessage, StaleDelivery, UnknownTopic
from holdfast.ids import derived_id
from holdfast.scrubbing import text_of, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.dlq.destination import DeadLetterStore
    from holdfast.ports import Broker, Delivery, Source


log = logging.getLogger("holdfast.dlq")
_BATCH = 500
_POLL_SECONDS = 1.0
_MOST_FAILURES = 3


@dataclass(slots=True)
class Collected:
    """What a collector did so far."""

    stored: int = 0
    unreadable: int = 0
    """Messages without a readable envelope: stored all the same, as a group of their own."""
    confirmed: int = 0
    """Replayed messages that a consumer without the store has handled."""
    unknown: int = 0
    """Reports of such about plans or letters that this store does not have: they close nothing."""


class Collector:
    """Stores each batch before it accepts it: a crash repeats, and a repeat changes nothing."""

    def __init__(
        self,
        source: Source,
        store: DeadLetterStore,
        *,
        clock: Clock = SYSTEM_CLOCK,
        backoff: Backoff | None = None,
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._backoff = Backoff(first=0.2, ceiling=30) if backoff is None else backoff
        self._stop = threading.Event()
        self._accepted: set[int] = set()
        self.collected = Collected()
        self.pulse = clock.monotonic()
        """When it last did anything, for probes."""
        self.down: str | None = "the broker was not asked yet"
        """Why nothing is collected now, None while it is."""

    def run(
        self, *, until_idle: bool = False, progress: Callable[[Collected], object] | None = None
    ) -> Collected:
        """Collect until `stop`; or, with *until_idle*, until nothing is left.

        While broker or database is down it waits and asks again; *until_idle* gives up then.
        """
        failures = 0
        while not self._stop.is_set():
            batch: list[Delivery] = []
            self.pulse = self._clock.monotonic()
            try:
                batch = self._source.poll(_BATCH, _POLL_SECONDS)
                if batch:
                    self._accepted.clear()
                    self.collect(batch)
                    failures = 0
                elif until_idle and not any(self._source.lag().values()):
                    break
                self.down = None
            except DependencyDown as error:
                failures += 1
                self.down = text_of(error)
                if until_idle and failures > _MOST_FAILURES:
                    raise
                delay = self._backoff.delay(failures) or self._backoff.ceiling
                log.warning("nothing is collected for %.1f s: %s", delay, text_of(error))
                self._clock.wait(self._stop, delay)
                self._give_back(batch)
            if progress is not None:
                progress(self.collected)
        self._source.flush()
        return self.collected

    def collect(self, batch: list[Delivery]) -> None:
        """Store *batch*, then accept it, in the order of what happened.

        It holds letters, and reports of replayed messages that were handled.
        """
        for are_reports, some in itertools.groupby(batch, key=_is_report):
            if are_reports:
                self._enter(list(some))
            else:
                self._keep(list(some))

    def _enter(self, batch: list[Delivery]) -> None:
        found = [report_in(delivery.message) for delivery in batch]
        reports = [report for report in found if report]
        unknown = enter(self._store.engine, reports, clock=self._clock)
        for report in unknown:
            log.warning("a report says that letter %s of plan %s was handled: this store has no "
                        "such plan with it, nothing is closed",
                        report.dlq_id, report.plan)  # fmt: skip
        self._settle(batch)
        METRICS.replayed.labels("unknown").inc(len(unknown))
        self.collected.unknown += len(unknown)
        self.collected.confirmed += len(reports) - len(unknown)

    def _keep(self, batch: list[Delivery]) -> None:
        """Store the letters of *batch*; one that cannot be stored holds up no other."""
        try:
            self._store.put_all([self._letter(delivery) for delivery in batch])
        except Exception as error:
            if not is_about_data(error):
                raise
            log.warning("letters are stored one by one: %s", told(error))
        else:
            # Stored before accepted: a crash here collects the same letters again.
            self._accept(batch)
            return
        refused: Exception | None = None
        for delivery in batch:
            try:
                self._one(delivery)
            except Exception as error:
                if not is_about_data(error):
                    raise
                log.error("message %s cannot be stored and stays on its topic: %s",  # noqa: TRY400
                          delivery.position, told(error))  # fmt: skip
                refused = error
            else:
                self._accept([delivery])
        if refused is not None:
            raise DependencyDown(f"a dead letter cannot be stored: {told(refused)}") from refused

    def _one(self, delivery: Delivery) -> None:
        """Store one letter; what no column takes is stored as one that cannot be read."""
        letter = self._letter(delivery)
        try:
            self._store.put(letter)
        except Exception as error:
            if not is_about_data(error) or isinstance(error, TooLarge):
                raise
            self.collected.unreadable += 1
            self._store.put(unreadable(delivery, error))

    def _accept(self, batch: list[Delivery]) -> None:
        self._settle(batch)
        self.collected.stored += len(batch)

    def _settle(self, batch: list[Delivery]) -> None:
        """Accept *batch*, which is in the store; what another member has by now it brings again."""
        try:
            self._source.accept(batch)
        except StaleDelivery as error:
            log.info("some of %d dead letters are stored once more by another: %s",
                     len(batch), error)  # fmt: skip
        self._accepted.update(map(id, batch))

    def _give_back(self, batch: list[Delivery]) -> None:
        """Have what was not stored handed out again; a source hands out each once."""
        for delivery in batch:
            if id(delivery) not in self._accepted:
                with contextlib.suppress(StaleDelivery, DependencyDown):
                    self._source.release(delivery, blame=False)

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
            return unreadable(delivery, error)


def _is_report(delivery: Delivery) -> bool:
    return report_in(delivery.message) is not None


def letter_in(delivery: Delivery) -> DeadLetter:
    """Return the letter that *delivery* of a dead-letter topic holds, whoever wrote it."""
    message = delivery.message
    if ENVELOPE not in message.headers and is_foreign(message):
        return imported(message, stored_at=delivery.timestamp)
    letter = from_topic(message, stored_at=delivery.timestamp)
    return msgspec.structs.replace(letter, origin="collected")


def unreadable(delivery: Delivery, error: Exception) -> DeadLetter:
    """Return a letter for what has no readable envelope: it is a message that nobody handled."""
    message = delivery.message
    group, handler = "unknown", "unknown"
    at = message.time.timestamp() if delivery.timestamp is None else delivery.timestamp
    dlq_id = dead_letter_id(group, handler, message)
    text = text_of(error)[:500]
    occurrence = Occurrence(
        id=derived_id("failure", dlq_id, delivery.coordinates_id()), at=at, error=text[:200]
    )
    return DeadLetter(
        dlq_id=dlq_id,
        message=message,
        coordinates=Coordinates(
            topic=delivery.lane.topic, lane=delivery.lane.partition, position=delivery.position
        ),
        culprit=FailedConsumer(group=group, handler=handler),
        failure=Failure(
            stage=FailureStage.DESERIALIZE,
            kind=Class.UNKNOWN,
            chain=(ExceptionInfo(type="unreadable envelope", text=text),),
            explicit=f"unreadable envelope on {delivery.lane.topic}",
        ),
        history=LetterHistory(first_failed_at=at, last_failed_at=at, failures=(occurrence,)),
        origin="collected",
    )


DAY = 86_400.0


def uncollected(broker: Broker, topics: Sequence[str], group: str = COLLECTOR) -> dict[str, int]:
    """Return how many letters of each of *topics* the collecting *group* has not stored yet."""
    found = {}
    for topic in topics:
        try:
            found[topic] = sum(broker.lag(group, [topic]).values())
        except UnknownTopic:
            found[topic] = 0  # it is made with its first dead letter
    return found


@dataclass(slots=True, kw_only=True)
class Uncollected:
    """Asked now and then, it remembers since when letters wait and none is collected.

    That is at most the age of the oldest one, for it begins when this process first looks.
    *retention* says for how long the broker keeps which topic; `*` stands for all others.
    """

    broker: Broker
    topics: Sequence[str]
    group: str = COLLECTOR
    retention: dict[str, float] = field(default_factory=dict)
    clock: Clock = SYSTEM_CLOCK
    letters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """For how long the longest waiting topic has not moved."""
    expiring: int = 0
    """Letters of topics that the broker's retention reaches within a day."""
    _since: dict[str, float] = field(default_factory=dict)

    def sample(self) -> None:
        """Count what waits now, by topic, and for how long."""
        now = self.clock.monotonic()
        found = uncollected(self.broker, self.topics, self.group)
        self.seconds, self.expiring = 0.0, 0
        for topic, count in found.items():
            moved = count < self.letters.get(topic, 0) or not count
            since = now if moved else self._since.get(topic, now)
            self._since[topic] = since
            self.seconds = max(self.seconds, now - since)
            kept = self.retention.get(topic, self.retention.get("*"))
            if kept is not None and count and now - since > kept - DAY:
                self.expiring += count
        self.letters = found
