"""Publishing to Kafka."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, InvalidMessage, Transient, UnknownTopic, Unsupported
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.brokers.kafka.driver import Producer
    from holdfast.caps import Caps
    from holdfast.clock import Clock
    from holdfast.message import Message

_log = logging.getLogger("holdfast.brokers.kafka")


class KafkaSink:
    """Publishes through one idempotent producer; a result means that all replicas have it.

    When the broker does not answer in time, everything on its way is dropped together with
    the producer: no later message of a batch can be stored once an earlier one was given
    up, so publishing the batch again keeps the order of each key.
    """

    def __init__(
        self,
        make: Callable[[], Producer],
        exists: Callable[[str], bool],
        caps: Caps,
        clock: Clock,
        *,
        seconds: float,
        transactional: bool,
    ) -> None:
        self.caps = caps
        self._make = make
        self._exists = exists
        self._clock = clock
        self._seconds = seconds
        self._transactional = transactional
        self._known: set[str] = set()
        self._closed = False
        self._producer: Producer | None = make()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Store *messages*, with a transactional id all or none of them."""
        if self._closed:
            raise Unsupported("be used after close()", "this sink", "make a new one")
        if not messages:
            return []
        refused = self._unknown({message.topic for message in messages} - self._known)
        until = self._clock.monotonic() + self._seconds
        if refused:
            return self._publish_but(refused, messages, until)
        return self._send(messages, until)

    def _publish_but(
        self, refused: dict[str, HoldfastError], messages: Sequence[Message], until: float
    ) -> list[Published]:
        if self._transactional:
            return [
                Published(error=refused.get(message.topic, _rolled_back())) for message in messages
            ]
        known = [message for message in messages if message.topic not in refused]
        results = iter(self._send(known, until) if known else ())
        return [
            Published(error=refused[message.topic]) if message.topic in refused else next(results)
            for message in messages
        ]

    def _unknown(self, topics: set[str]) -> dict[str, HoldfastError]:
        """Return the error of each of *topics* that does not exist, and learn the others."""
        errors: dict[str, HoldfastError] = {}
        for topic in topics:
            try:
                if self._exists(topic):
                    self._known.add(topic)
                else:
                    errors[topic] = UnknownTopic(topic, "create it with broker.create_topic()")
            except InvalidMessage as error:  # no topic can have that name
                errors[topic] = error
        return errors

    def _send(self, messages: Sequence[Message], until: float) -> list[Published]:
        if self._producer is None:
            self._producer = self._make()
        try:
            if self._transactional:
                return self._send_whole(self._producer, messages, until)
            return self._producer.publish(messages, until)
        except BaseException as error:
            # Also when interrupted: what is on its way must not arrive behind its successors.
            _log.warning("dropping the producer and what it holds: %s", error)
            producer, self._producer = self._producer, None
            producer.abandon()
            raise

    def _send_whole(
        self, producer: Producer, messages: Sequence[Message], until: float
    ) -> list[Published]:
        producer.begin()
        results = producer.publish(messages, until)
        if all(result.error is None for result in results):
            producer.commit(until)
            return results
        producer.abort(until)
        return [
            result if result.error is not None else Published(error=_rolled_back())
            for result in results
        ]

    def close(self) -> None:
        """Close the producer; nothing is on its way between publishes."""
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


def _rolled_back() -> HoldfastError:
    return Transient("rolled back: another message of the same transaction was refused")


