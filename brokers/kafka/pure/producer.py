"""Publishing, through kafka-python."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kafka import KafkaProducer
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)
from kafka.serializer import Serializer

from holdfast.brokers.kafka.nulls import hidden
from holdfast.brokers.kafka.pure.admin import connected
from holdfast.brokers.kafka.pure.faults import FENCED, translated, translation
from holdfast.brokers.kafka.pure.loop import Network
from holdfast.brokers.kafka.sizes import wire_size
from holdfast.cloudevents import to_wire
from holdfast.errors import (
    BrokerDown,
    HoldfastError,
    InvalidMessage,
    MessageTooLarge,
    UnknownTopic,
)
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.brokers.kafka.settings import KafkaSettings
    from holdfast.clock import Clock
    from holdfast.message import Message

MAX_REQUEST: int = KafkaProducer.DEFAULT_CONFIG["max_request_size"]
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)


class _Wire(Serializer):  # type: ignore[misc]
    """Writes a message's headers and payload.

    `send` itself refuses records with neither key nor value, which Kafka has; a value that
    only its serializer makes null passes.
    """

    def serialize(self, topic: str, headers: list[Any], data: Message) -> bytes | None:
        """Add the headers of *data* and return its payload."""
        headers.extend(hidden(to_wire(data)))
        return data.payload


class PureProducer:
    """A thin layer over `KafkaProducer`."""

    def __init__(self, configs: Mapping[str, Any], settings: KafkaSettings, clock: Clock) -> None:
        self._clock = clock
        self._limit = int(configs.get("max_request_size", MAX_REQUEST))
        seconds = min(settings.timeout, settings.publish_within)
        self._configs = {
            "max_block_ms": int(seconds * 1000),
            **configs,
            "value_serializer": _Wire(),
        }
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._transactional = configs.get("transactional_id") is not None
        self._client: Any = connected(KafkaProducer, self._configs, Network())
        if self._transactional:
            try:
                with translated("starting transactions"):
                    self._client.init_transactions()
            except BaseException:
                self.abandon()
                raise

    def publish(
        self, messages: Sequence[Message], until: float, *, located: bool = True
    ) -> list[Published]:
        """Send all, then wait for each."""
        futures = [self._send(message) for message in messages]
        self._flush(until)
        results = [
            self._result(message, future) for message, future in zip(messages, futures, strict=True)
        ]
        refused = [
            place
            for place, future in enumerate(futures)
            if results[place].error is not None and not isinstance(future, HoldfastError)
        ]
        if refused and not self._transactional:
            self._try_alone(messages, refused, results, until)
        return results

    def _try_alone(
        self,
        messages: Sequence[Message],
        refused: list[int],
        results: list[Published],
        until: float,
    ) -> None:
        """Send each of *refused* by itself, in order.

        When the broker refuses one message, kafka-python fails everything behind it with
        the same error and is of no more use. What failed is all that was left of its lane,
        so the order holds.
        """
        if len(refused) == 1:
            self._renew()
            return
        for place in refused:
            self._renew()
            future = self._send(messages[place])
            self._flush(until)
            results[place] = self._result(messages[place], future)
        self._renew()

    def _renew(self) -> None:
        self.abandon()
        self._client = connected(KafkaProducer, self._configs, Network())

    def _flush(self, until: float) -> None:
        with translated("publishing"):
            self._client.flush(timeout=max(until - self._clock.monotonic(), 0.0))

    def _send(self, message: Message) -> Any:
        """Return the client's future, or the error of a message that cannot be sent."""
        try:
            return self._client.send(message.topic, value=message, key=message.key, headers=[])
        except _TOO_LARGE:
            return MessageTooLarge(wire_size(message), self._limit)
        except InvalidMessage as error:
            return error
        except KafkaError as error:
            raise translation(error, "publishing") from error

    def _result(self, message: Message, future: Any) -> Published:
        if isinstance(future, HoldfastError):
            return Published(error=future)
        if (error := future.exception) is None:
            stored = future.value
            return Published(None, self._lane(stored.topic, stored.partition), stored.offset)
        if isinstance(error, _TOO_LARGE):
            return Published(error=MessageTooLarge(wire_size(message), self._limit))
        fault = translation(error, "publishing")
        if isinstance(fault, UnknownTopic):
            fault = UnknownTopic(message.topic, "it was deleted; create it again")
        if isinstance(fault, BrokerDown) or isinstance(error, FENCED):
            raise fault from error  # about the producer, not about this message
        return Published(error=fault)

    def _lane(self, topic: str, partition: int) -> Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = Lane(topic, partition)
        return lane

    def begin(self) -> None:
        """Open a transaction."""
        with translated("beginning a transaction"):
            self._client.begin_transaction()

    def commit(self, until: float) -> None:
        """Commit the transaction."""
        self._bounded(self._client.commit_transaction, "committing the transaction", until)

    def abort(self, until: float) -> None:
        """Abort the transaction."""
        self._bounded(self._client.abort_transaction, "aborting the transaction", until)

    def _bounded(self, work: Callable[[], None], doing: str, until: float) -> None:
        """Run what the client offers no timeout for; an unfinished one ends with `abandon`."""
        failures: list[KafkaError] = []

        def run() -> None:
            try:
                work()
            except KafkaError as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="holdfast-kafka-transaction", daemon=True)
        thread.start()
        thread.join(max(until - self._clock.monotonic(), 0.0))
        if thread.is_alive():
            raise BrokerDown(f"{doing}: no answer in time")
        if failures:
            raise translation(failures[0], doing) from failures[0]

    def abandon(self) -> None:
        """Close by force: `close` would first wait for what cannot be sent."""
        client, sender = self._client, self._client._sender
        sender.force_close()
        try:
            client.close(timeout=0)
        except KafkaTimeoutError:
            client._closed = True
            client._unregister_cleanup()
        sender.join(1.0)  # it may be waiting for an answer; it ends by itself

    def close(self) -> None:
        """Close; nothing is outstanding."""
        with translated("closing"):
            self._client.close(timeout=5.0)
