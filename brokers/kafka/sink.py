"""Publishing to Kafka, and how large a message is in a batch of Kafka's."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from holdfast.brokers.kafka.errors import UNSENT, is_open, is_refused, try_alone
from holdfast.cloudevents import to_wire
from holdfast.errors import (
    BrokerDown,
    HoldfastError,
    InvalidMessage,
    MessageTooLarge,
    Transient,
    UnknownTopic,
    Unsupported,
)
from holdfast.ports import Published, SinkPowers
from holdfast.stored_message import topics_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from holdfast.brokers.kafka.cluster import Cluster
    from holdfast.brokers.kafka.driver import Producer
    from holdfast.clock import Clock
    from holdfast.message import Message
    from holdfast.ports import Caps


_RECORD, _HEADER, _BATCH = 24, 6, 64  # bytes of framing, rounded up


def wire_size(message: Message) -> int:
    """Return the bytes of payload, key and all headers."""
    headers = sum(len(name) + len(value or b"") for name, value in to_wire(message))
    return len(message.payload or b"") + len(message.key or b"") + headers


def batch_size(message: Message) -> int:
    """Return the bytes of a batch with *message* alone, at most."""
    return _BATCH + _record_size(message)


def _record_size(message: Message) -> int:
    return wire_size(message) + _RECORD + _HEADER * len(to_wire(message))


def chunks(messages: Sequence[Message], limit: int) -> Iterator[Sequence[Message]]:
    """Yield *messages* in runs that fit into one batch of *limit* bytes, in order.

    One that fits into none is a run of its own: the broker says so better.
    """
    start, size = 0, _BATCH
    for place, message in enumerate(messages):
        own = _record_size(message)
        if place > start and size + own > limit:
            yield messages[start:place]
            start, size = place, _BATCH
        size += own
    yield messages[start:]


_log = logging.getLogger("holdfast.brokers.kafka")


class KafkaSink(SinkPowers):
    """Publishes through one idempotent producer; a result means that all replicas have it.

    Kafka refuses a message together with others, which are sent again without it. Where that
    must not be (behind a refused message of the key) or cannot be (in time), their result is
    `Transient`: publish them again.

    When the broker does not answer in time, everything on its way is dropped together with
    the producer: no later message of a batch can be stored once an earlier one was given
    up, so publishing the batch again keeps the order of each key.
    """

    keeps_deadlines = True

    def __init__(
        self,
        make: Callable[[], Producer],
        cluster: Cluster,
        caps: Caps,
        clock: Clock,
        *,
        seconds: float,
        transactional: bool,
        compresses: bool,
    ) -> None:
        self.caps = caps
        self._make = make
        self._cluster = cluster
        self._clock = clock
        self._seconds = seconds
        self._transactional = transactional
        self._compresses = compresses
        self._known: set[str] = set()
        self._narrow: dict[str, int] = {}
        self._absent: dict[str, HoldfastError] = {}
        """Topics that were missing when `room` was asked for last."""
        self._gone: set[str] = set()
        """Topics that were missing when they were looked up last."""
        self._closed = False
        self._producer: Producer | None = make()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Store *messages*, with a transactional id all or none of them."""
        return self._publish(messages, self._seconds, located=True)

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        """Do as `publish`, but give up after *seconds* if that is less than the setting.

        What was given up is dropped with its producer: nothing of it is sent later. Results
        need not tell where messages are stored.
        """
        return self._publish(messages, seconds, located=False)

    def prepare(self) -> None:
        """Get ready for `publish_within`, so that its first call need not."""
        if self._producer is not None:
            self._producer.prepare(located=False)

    def _publish(
        self, messages: Sequence[Message], seconds: float, *, located: bool
    ) -> list[Published]:
        if self._closed:
            raise Unsupported("be used after close()", "this sink", "make a new one")
        if not messages:
            return []
        if seconds <= 0:
            raise BrokerDown("publishing: no time was left for it")
        until = self._clock.monotonic() + min(seconds, self._seconds)
        refused = self._learn(set(topics_of(messages)) - self._known)
        if not refused:
            return self._send(messages, until, located=located)
        if self._transactional:
            return [Published(error=refused.get(m.topic, _rolled_back())) for m in messages]
        known = [message for message in messages if message.topic not in refused]
        results = iter(self._send(known, until, located=located) if known else ())
        return [
            Published(error=refused[message.topic]) if message.topic in refused else next(results)
            for message in messages
        ]

    def room(self, topics: Collection[str]) -> int | None:
        """Return how many bytes a message may have in each of *topics*; 0 where one is missing."""
        self._absent = self._learn(set(topics) - self._known)
        return 0 if self._absent else min(map(self._largest, topics), default=None)

    def refusal(self, message: Message) -> HoldfastError | None:
        """Return why client or broker would refuse *message*, as far as that shows beforehand."""
        if message.topic in self._absent:
            return self._absent[message.topic]
        limit = self._largest(message.topic)
        return MessageTooLarge(wire_size(message), limit) if batch_size(message) > limit else None

    def _largest(self, topic: str) -> int:
        """Return the bytes that fit; the topic's limit is for what compression leaves of them."""
        limit = self.caps.max_message
        assert limit is not None  # noqa: S101 - every driver has one
        return limit if self._compresses else min(limit, self._narrow.get(topic, limit))

    def _learn(self, topics: set[str]) -> dict[str, HoldfastError]:
        """Look *topics* up, and return the errors of those that cannot be published to."""
        errors: dict[str, HoldfastError] = {}
        for name in topics:
            try:
                # Who is told once that it is missing is told again without delay.
                largest = self._cluster.topic(name, patient=name not in self._gone).largest
            except (InvalidMessage, UnknownTopic) as error:
                errors[name] = error
                self._gone.add(name)
                continue
            self._gone.discard(name)
            self._known.add(name)
            if largest is not None and self.caps.max_message and largest < self.caps.max_message:
                self._narrow[name] = largest
        return errors

    def _send(self, messages: Sequence[Message], until: float, *, located: bool) -> list[Published]:
        if self._producer is None:
            self._producer = self._make()
        try:
            if self._transactional:
                return self._send_whole(self._producer, messages, until)
            publish = partial(self._producer.publish, until=until, located=located)
            return self._send_runs(publish, messages)
        except BaseException as error:
            # Also when interrupted: what is on its way must not arrive behind its successors.
            self._drop(str(error))
            raise

    def _send_runs(
        self, publish: Callable[[Sequence[Message]], list[Published]], messages: Sequence[Message]
    ) -> list[Published]:
        """Send one run after the other; nothing overtakes what could not be sent."""
        results: list[Published] = []
        for run in self._runs(messages):
            is_stuck = any(map(is_open, results))
            results += [UNSENT] * len(run) if is_stuck else publish(run)
        return results

    def _drop(self, reason: str) -> None:
        """Give the producer up with all that it holds; the next publish makes a new one."""
        _log.warning("dropping the producer and what it holds: %s", reason)
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.abandon()
        self._known.clear()
        self._cluster.forget()

    def _runs(self, messages: Sequence[Message]) -> Iterable[Sequence[Message]]:
        """Return all at once, or runs that a topic with a low limit takes as one batch.

        A batch beyond the topic's limit would be refused with all messages in it.
        """
        narrow = self._narrow
        limits = [narrow[m.topic] for m in messages if m.topic in narrow] if narrow else ()
        return chunks(messages, min(limits)) if limits else (messages,)

    def _send_whole(
        self, producer: Producer, messages: Sequence[Message], until: float
    ) -> list[Published]:
        producer.begin()
        results: list[Published] = []
        for run in self._runs(messages):
            results += producer.publish(run, until)
            if any(result.error is not None for result in results):
                return self._roll_back(producer, messages, results, until)
        producer.commit(until)
        return results

    def _roll_back(
        self,
        producer: Producer,
        messages: Sequence[Message],
        results: list[Published],
        until: float,
    ) -> list[Published]:
        self._take_back(producer, until, spoilt=True)
        rest = [Published()] * (len(messages) - len(results))
        found = [
            result if self._is_to_blame(message, result) else Published()
            for message, result in zip(messages, [*results, *rest], strict=True)
        ]
        suspects = [place for place, result in enumerate(found) if is_refused(result)]
        if len(suspects) > 1:
            try_alone(messages, suspects, found, partial(self._probe, until=until))
        return [r if is_refused(r) else Published(error=_rolled_back()) for r in found]

    def _probe(self, message: Message, until: float) -> Published:
        """Return whether Kafka takes *message*, by a transaction that is taken back."""
        if self._clock.monotonic() >= until:
            return UNSENT
        if self._producer is None:
            self._producer = self._make()
        self._producer.begin()
        [result] = self._producer.publish([message], until)
        self._take_back(self._producer, until, spoilt=result.error is not None)
        return result

    def _take_back(self, producer: Producer, until: float, *, spoilt: bool) -> None:
        try:
            producer.abort(until)
        except HoldfastError as error:  # the successor's start takes the transaction back
            _log.warning("a transaction is left to its successor: %s", error)
            spoilt = True
        if spoilt:  # both clients lose count of their sequence numbers by a refused message
            self._drop("a message was refused")

    def _is_to_blame(self, message: Message, result: Published) -> bool:
        """Whether *message* itself was refused; clients blame others of its batch as well."""
        if not isinstance(result.error, MessageTooLarge):
            return is_refused(result)
        limits = (self._narrow.get(message.topic), self.caps.max_message)
        return batch_size(message) > min(limit for limit in limits if limit is not None)

    def close(self) -> None:
        """Close the producer; nothing is on its way between publishes."""
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


def _rolled_back() -> HoldfastError:
    return Transient("rolled back: another message of the same transaction was refused")
