"""Publishing, through confluent-kafka."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Producer

from holdfast.brokers.kafka.client_log import log_in
from holdfast.brokers.kafka.confluent.errors import FENCED, TOO_LARGE, translated, translation
from holdfast.brokers.kafka.errors import UNSENT, check_outage, is_refused, try_alone
from holdfast.brokers.kafka.sink import wire_size
from holdfast.cloudevents import records_of
from holdfast.errors import (
    BrokerDown,
    HoldfastError,
    InvalidMessage,
    MessageTooLarge,
    UnknownTopic,
)
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.clock import Clock
    from holdfast.message import Message
    from holdfast.stored_message import Record

_log = logging.getLogger("holdfast.brokers.kafka")
MAX_MESSAGE = 1_000_000  # librdkafka's default
_UNTOLD = Published(error=BrokerDown("publishing: librdkafka did not report"))
_STORED = Published()
_FULL_SECONDS = 0.1  # a pause for the queue to drain
_PLAIN = {
    "enable.idempotence": False,
    "enable.gapless.guarantee": False,
    "max.in.flight": 1,
}
_TERSE = {"delivery.report.only.error": True}
"""Reports of failures only. Each report takes a message's bytes along into Python."""


class _Lanes(dict[str, dict[int, Lane]]):
    """Lanes by topic and partition, made when first asked for."""

    def __missing__(self, topic: str) -> dict[int, Lane]:
        self[topic] = lanes = _Partitions(topic)
        return lanes


class _Partitions(dict[int, Lane]):
    def __init__(self, topic: str) -> None:
        super().__init__()
        self._topic = topic

    def __missing__(self, partition: int) -> Lane:
        self[partition] = lane = Lane(self._topic, partition)
        return lane


def _reporter(
    results: list[Published], failures: list[tuple[int, KafkaError]], lanes: _Lanes
) -> Callable[[int, KafkaError | None, Any], None]:
    """Return what librdkafka calls for every single message: it looks up as little as can be."""

    def report(index: int, error: KafkaError | None, record: Any) -> None:
        if error is None:
            results[index] = Published(
                None, lanes[record.topic()][record.partition()], record.offset()
            )
        else:
            failures.append((index, error))

    return report


def _brief_reporter(
    results: list[Published], failures: list[tuple[int, KafkaError]]
) -> Callable[[int, KafkaError | None, Any], None]:
    """Return the same for those who do not ask where a message is."""

    def report(index: int, error: KafkaError | None, _record: Any) -> None:
        if error is None:
            results[index] = _STORED
        else:
            failures.append((index, error))

    return report


class ConfluentProducer:
    """A thin layer over `Producer`; delivery reports find their message by a bound index."""

    def __init__(self, configs: dict[str, Any], settings: KafkaSettings, clock: Clock) -> None:
        self._clock = clock
        self._limit = int(configs.get("message.max.bytes", MAX_MESSAGE))
        self._lanes = _Lanes()
        self._reports: list[partial[None]] = []
        self._briefs: list[partial[None]] = []
        self._results: list[Published] = []
        self._failures: list[tuple[int, KafkaError]] = []
        self._failed: list[int] = []
        self._is_whole = True
        self._mode: dict[str, Any] = {}
        """What the client has beyond the settings."""
        self._is_told = True
        """Whether no report can have been lost."""
        self._report = _reporter(self._results, self._failures, self._lanes)
        self._brief = _brief_reporter(self._results, self._failures)
        self._configs = configs
        self._log = log_in(configs, clock)
        self._transactional = "transactional.id" in configs
        with translated("making a Kafka producer"):
            self._client = Producer(configs)
            if self._transactional:
                self._client.init_transactions(settings.timeout)

    def publish(
        self, messages: Sequence[Message], until: float, *, located: bool = True
    ) -> list[Published]:
        """Hand all to librdkafka, then wait for the report of each; what failed is tried alone.

        With a refusal everything behind it fails and the client is of no more use (see
        `enable.gapless.guarantee` in the driver), so the order holds. Without idempotence a
        client outlives a refusal, and one message at a time needs none.

        Unless *located*, the client reports failures only. When a report may have been lost
        by a refusal, all that it did not report are tried again: repeated, never missed.
        """
        try:
            results = self._published(messages, until, located=located)
        except BrokerDown:
            self._log.fell()
            raise
        self._log.answered()
        return results

    def _published(
        self, messages: Sequence[Message], until: float, *, located: bool
    ) -> list[Published]:
        self.prepare(located=located)
        results = self._attempt(messages, until, located=located)
        if self._failed and not self._transactional:
            send = partial(self._alone, until=until, located=located)
            self._renew(**_PLAIN)
            try_alone(messages, self._failed.copy(), results, send)
            self.prepare(located=located)
        return results

    def prepare(self, *, located: bool) -> None:
        """Have a client that reports all, or failures only unless *located*.

        A new one needs half a second for its first message; nothing may be on its way.
        """
        wanted = {} if located or self._transactional else _TERSE
        if self._mode != wanted:
            self._renew(**wanted)

    def _alone(self, message: Message, until: float, *, located: bool) -> Published:
        """Send *message* and wait for its report; an outage is only its own."""
        if self._clock.monotonic() >= until:
            return UNSENT
        try:
            return self._attempt([message], until, located=located)[0]
        except BrokerDown as error:
            return Published(error=error)

    def _attempt(
        self, messages: Sequence[Message], until: float, *, located: bool
    ) -> list[Published]:
        """Send all and wait for the report of each."""
        results, failures = self._results, self._failures
        results[:] = [_STORED if self._mode == _TERSE else _UNTOLD] * len(messages)
        failures.clear()
        self._is_whole = self._is_told = True
        produce: Any = self._client.produce
        reports = self._reports_for(len(messages), located=located)
        for index, record in enumerate(records_of(messages)):
            if isinstance(record, InvalidMessage):
                results[index] = Published(error=record)
                continue
            topic, payload, key, headers = record
            try:
                try:
                    produce(topic, payload, key, -1, reports[index], None, 0, headers)
                except BufferError:
                    self._produce_late(record, reports[index], until)
            except KafkaException as error:
                results[index] = Published(error=self._fault(error.args[0], messages[index]))
                self._is_whole = False
        own = frozenset() if self._is_whole else _refused(results)
        self._wait(until)
        self._failed = self._judge(messages, own) if failures or not self._is_whole else []
        return results.copy()

    def _judge(self, messages: Sequence[Message], own: Collection[int]) -> list[int]:
        """Put the failures into the results; return the places of all but the client's *own*.

        A report that got lost is a failure, too: see `_serve`.
        """
        if not self._is_told and self._mode == _TERSE:
            self._results[:] = [_UNTOLD if r is _STORED else r for r in self._results]
        for index, failure in self._failures:
            self._results[index] = Published(error=self._fault(failure, messages[index]))
        check_outage(self._results)
        return [
            place
            for place, result in enumerate(self._results)
            if result.error is not None and place not in own
        ]

    def _renew(self, **configs: Any) -> None:
        self.abandon()
        with translated("making a Kafka producer"):
            self._client = Producer({**self._configs, **configs})
        self._mode = configs

    def _reports_for(self, count: int, *, located: bool) -> list[partial[None]]:
        """Return a callback per index: librdkafka's reports do not say which message it was.

        They are kept from batch to batch. Thousands of new ones each time would make the
        garbage collector walk through the whole program every few batches.
        """
        kept, report = (self._reports, self._report) if located else (self._briefs, self._brief)
        for index in range(len(kept), count):
            kept.append(partial(report, index))
        return kept

    def _produce_late(self, record: Record, report: partial[None], until: float) -> None:
        """Produce although the queue is full: have it sent, and serve reports meanwhile.

        Nothing would leave a queue of the user's own size before it has lingered.
        """
        topic, payload, key, headers = record
        given: Any = headers
        while True:
            if self._clock.monotonic() > until:
                raise BrokerDown("publishing: Kafka takes no more messages")
            self._serve(self._client.flush, _FULL_SECONDS)
            try:
                self._client.produce(topic, payload, key, on_delivery=report, headers=given)
            except BufferError:
                continue
            return

    def _wait(self, until: float) -> None:
        """Return once every report has been served."""
        while self._serve(self._client.flush, max(until - self._clock.monotonic(), 0.0)):
            if self._clock.monotonic() >= until:
                raise BrokerDown(
                    f"publishing: {len(self._client)} messages are not acknowledged in time"
                )

    def _serve(self, serve: Callable[[float], int], seconds: float) -> int:
        """Let librdkafka report and return how much is left, at least.

        A fatal error of its own is raised as what it means.
        """
        caught: Any
        try:
            return serve(min(seconds, 1.0))
        except:  # noqa: E722 - it raises fatal errors as a class that is no exception at all
            caught = sys.exc_info()[1]
        error = caught
        while error is not None:
            if isinstance(error, (KafkaError, KafkaException)):
                native = error if isinstance(error, KafkaError) else error.args[0]
                if native.code() != KafkaError._GAPLESS_GUARANTEE:
                    raise translation(native, "publishing")
                # A message was refused. The reports say the rest, but this may have cost one.
                self._is_whole = self._is_told = False
                return 1
            error = getattr(error, "__cause__", None)
        raise caught

    def _fault(self, error: KafkaError, message: Message) -> HoldfastError:
        if error.code() in TOO_LARGE:
            return MessageTooLarge(wire_size(message), self._limit)
        fault = translation(error, "publishing")
        if isinstance(fault, UnknownTopic):
            fault = UnknownTopic(message.topic, "it was deleted; create it again")
        if error.code() in FENCED:
            raise fault  # about the producer, not about this message
        return fault

    def begin(self) -> None:
        """Open a transaction."""
        with translated("beginning a transaction"):
            self._client.begin_transaction()

    def commit(self, until: float) -> None:
        """Commit the transaction."""
        with translated("committing the transaction"):
            self._client.commit_transaction(max(until - self._clock.monotonic(), 0.1))

    def abort(self, until: float) -> None:
        """Abort the transaction."""
        with translated("aborting the transaction"):
            self._client.abort_transaction(max(until - self._clock.monotonic(), 0.1))

    def abandon(self) -> None:
        """Drop everything in queue and in flight, and the client with its last reference."""
        try:
            self._client.purge()
            self._client.flush(1.0)
        except:  # noqa: E722 - see `_serve`; what is broken is gone now
            _log.debug("dropping a producer: %s", sys.exc_info()[1])
        self._briefs.clear()
        self._reports.clear()  # they refer to this object, and it to the client
        del self._client

    def close(self) -> None:
        """Close; nothing is outstanding."""
        self._briefs.clear()
        self._reports.clear()
        self._client.close()


def _refused(results: Sequence[Published]) -> frozenset[int]:
    return frozenset(place for place, result in enumerate(results) if is_refused(result))
