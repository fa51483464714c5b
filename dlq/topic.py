"""The broker topic as a home of dead letters, `<topic>.<group>.dlq`."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from holdfast.dlq.metrics import METRICS
from holdfast.dlq.wire import MOST_BYTES, to_topic
from holdfast.errors import BrokerDown, DependencyDown, HoldfastError, MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.dlq.homes import Home
    from holdfast.dlq.letter import DeadLetter
    from holdfast.message import Message
    from holdfast.ports import Broker, Sink

log = logging.getLogger("holdfast.dlq")


COLLECTOR = "holdfast-dlq-collector"
"""The group that collects dead letters, unless told otherwise."""


_ROOM = 32_768  # bytes that the envelope adds to a message, at most
_FRAMING = 1_024  # what brokers add to the bytes of a message, at most
_LIMITS = (
    "on Kafka max.message.bytes of the topic, and max_request_size (kafka-python) or "
    "message.max.bytes (confluent) in the broker's URL; on NATS max_payload, on RabbitMQ "
    "max_message_size"
)


def ready(broker: Broker, topic: str, group: str = COLLECTOR, *, like: str | None = None) -> None:
    """Make sure that *topic* exists and keeps what is published before anybody collects it.

    RabbitMQ stores nothing for which there is no group, so the collector's is made at once.
    Where the adapter can, a new topic has room for an envelope beside the largest message
    of *like*, the topic of the originals.
    """
    create: Callable[..., object] | None = getattr(broker, "create_larger", None)
    if create is None or like is None:
        broker.create_topic(topic)
    else:
        try:
            create(topic, like=like, more=_ROOM)
        except BrokerDown:
            raise
        except HoldfastError as error:
            log.warning("topic %s has no room for large messages: %s", topic, error)
            broker.create_topic(topic)
    broker.create_group(topic, group)


class TopicHome:
    """Publishes dead letters to a topic of the broker that the message came from.

    When that fails the letter goes to *quarantine*, the database if there is one; without
    one the error goes out, and the message must not be acknowledged. *prepare* is called
    with the name of a dead-letter topic before its first use; `TopicHome.on(broker)` does
    what every broker needs.
    """

    in_thread = False  # threads do not share a sink

    def __init__(
        self,
        sink: Sink,
        *,
        quarantine: Home | None = None,
        prepare: Callable[[str], object] | None = None,
        most_header_bytes: int | None = None,
    ) -> None:
        self._sink = sink
        self._quarantine = quarantine
        self._ready: Callable[[str, str], object] | None = None
        if prepare is not None:
            self._ready = lambda topic, _like: prepare(topic)
        self._prepared: set[str] = set()
        self._lock = threading.Lock()  # handlers run in threads, which do not share a sink
        limit = sink.caps.max_headers
        if most_header_bytes is None:
            most_header_bytes = MOST_BYTES if limit is None else min(MOST_BYTES, limit // 2)
        self._most = most_header_bytes

    @classmethod
    def on(cls, broker: Broker, *, quarantine: Home | None = None) -> TopicHome:
        """Return a home on *broker* that makes its topics ready by itself."""
        larger: Callable[[int], Sink] | None = getattr(broker, "larger_sink", None)
        home = cls(broker.sink() if larger is None else larger(_ROOM), quarantine=quarantine)
        home._ready = lambda topic, like: ready(broker, topic, like=like)
        return home

    def put(self, letter: DeadLetter, connection: Connection | None = None) -> None:
        """Return once the broker has taken *letter*, or the quarantine has."""
        try:
            self._publish(letter)
        except HoldfastError as error:
            METRICS.write_failed("topic")
            if self._quarantine is None:
                raise DependencyDown(
                    f"dead letter {letter.dlq_id} cannot be published: {error}"
                ) from error
            log.warning("dead letter %s goes to quarantine: %s", letter.dlq_id, error)
            kept = msgspec.structs.replace(letter, origin="quarantine")
            self._quarantine.put(kept, connection)
        else:
            METRICS.put(letter)

    def close(self) -> None:
        """Release the sink."""
        self._sink.close()

    def _publish(self, letter: DeadLetter) -> None:
        message = to_topic(letter, most=self._most)
        with self._lock:
            if self._ready is not None and message.topic not in self._prepared:
                self._ready(message.topic, letter.message.topic)
                self._prepared.add(message.topic)
            (result,) = self._sink.publish([message])
            if isinstance(result.error, MessageTooLarge):
                # A message near the broker's limit leaves no room for more than the least.
                message = to_topic(letter, most=0)
                (result,) = self._sink.publish([message])
        if isinstance(result.error, MessageTooLarge):
            raise _no_room(message, result.error) from result.error
        if result.error is not None:
            raise result.error


def _no_room(message: Message, error: MessageTooLarge) -> DependencyDown:
    return DependencyDown(
        f"it does not fit on {message.topic}: raise the limit to {error.size + _FRAMING:,} bytes "
        f"or more ({_LIMITS}), or give the home a quarantine=StoreHome(engine)"
    )
