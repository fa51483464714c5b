"""Publishing, through confluent-kafka."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Producer

from holdfast.brokers.kafka.confluent.faults import FENCED, TOO_LARGE, translated, translation
from holdfast.brokers.kafka.sizes import wire_size
from holdfast.cloudevents import text_list
from holdfast.errors import (
    BrokerDown,
    HoldfastError,
    InvalidMessage,
    MessageTooLarge,
    UnknownTopic,
)
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.brokers.kafka.settings import KafkaSettings
    from holdfast.clock import Clock
    from holdfast.message import Message

_log = logging.getLogger("holdfast.brokers.kafka")
MAX_MESSAGE = 1_000_000  # librdkafka's default
_UNSENT = Published(error=HoldfastError("no report yet"))
_STORED = Published()
_FULL_SECONDS = 0.1  # a pause for the queue to drain


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


def _failure_reporter(
    failures: list[tuple[int, KafkaError]],
) -> Callable[[int, KafkaError | None, Any], None]:
    """Return the same for those who only want to know what failed: half the work."""

    def report(index: int, error: KafkaError | None, _record: Any) -> None:
        if error is not None:
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
        self._report = _reporter(self._results, self._failures, self._lanes)
        self._brief = _failure_reporter(self._failures)
        with translated("making a Kafka producer"):
            self._client = Producer(configs)
            if "transactional.id" in configs:
                self._client.init_transactions(settings.timeout)

    def publish(
        self, messages: Sequence[Message], until: float, *, located: bool = True
    ) -> list[Published]:
        """Hand all to librdkafka, then wait for the report of each."""
        results, failures = self._results, self._failures
        results[:] = [_UNSENT if located else _STORED] * len(messages)
        failures.clear()
        produce: Any = self._client.produce
        reports = self._reports_for(len(messages), located=located)
        for index, message in enumerate(messages):
            try:
                produce(
                    message.topic, message.payload, message.key, -1, reports[index],
                    None, 0, text_list(message),
                )  # fmt: skip
            except BufferError:
                self._produce_late(message, reports[index], until)
            except KafkaException as error:
                failures.append((index, error.args[0]))
            except InvalidMessage as error:
                results[index] = Published(error=error)
        self._wait(until)
        for index, failure in failures:
            results[index] = Published(error=self._fault(failure, messages[index]))
        return results.copy()

    def _reports_for(self, count: int, *, located: bool) -> list[partial[None]]:
        """Return a callback per index: librdkafka's reports do not say which message it was.

        They are kept from batch to batch. Thousands of new ones each time would make the
        garbage collector walk through the whole program every few batches.
        """
        kept, report = (self._reports, self._report) if located else (self._briefs, self._brief)
        for index in range(len(kept), count):
            kept.append(partial(report, index))
        return kept

    def _produce_late(self, message: Message, report: partial[None], until: float) -> None:
        """Produce although the queue is full: wait for room, and serve reports meanwhile."""
        headers: Any = text_list(message)
        while True:
            if self._clock.monotonic() > until:
                raise BrokerDown("publishing: Kafka takes no more messages")
            self._serve(self._client.poll, _FULL_SECONDS)
            try:
                self._client.produce(
                    message.topic, message.payload, message.key, on_delivery=report, headers=headers
                )
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
        """Let librdkafka report; a fatal error of its own is raised as what it means."""
        caught: Any
        try:
            return serve(min(seconds, 1.0))
        except:  # noqa: E722 - it raises fatal errors as a class that is no exception at all
            caught = sys.exc_info()[1]
        for error in (caught, getattr(caught, "__cause__", None)):
            if isinstance(error, (KafkaError, KafkaException)):
                native = error if isinstance(error, KafkaError) else error.args[0]
                raise translation(native, "publishing")
        raise caught

    def _fault(self, error: KafkaError, message: Message) -> HoldfastError:
        if error.code() in TOO_LARGE:
            return MessageTooLarge(wire_size(message), self._limit)
        fault = translation(error, "publishing")
        if isinstance(fault, UnknownTopic):
            fault = UnknownTopic(message.topic, "it was deleted; create it again")
        if isinstance(fault, BrokerDown) or error.code() in FENCED:
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
