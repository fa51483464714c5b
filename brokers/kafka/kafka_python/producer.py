"""Publishing, through kafka-python."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from kafka import KafkaProducer
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)
from kafka.serializer import Serializer

from holdfast.brokers.kafka.driver import hidden
from holdfast.brokers.kafka.errors import UNSENT, check_outage, is_open, is_refused, try_alone
from holdfast.brokers.kafka.kafka_python.admin import connected
from holdfast.brokers.kafka.kafka_python.errors import FENCED, translated, translation
from holdfast.brokers.kafka.kafka_python.network import Network
from holdfast.brokers.kafka.sink import wire_size
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

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.client_log import ClientLog
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


class KafkaPythonProducer:
    """A thin layer over `KafkaProducer`."""

    def __init__(
        self, configs: Mapping[str, Any], settings: KafkaSettings, clock: Clock, log: ClientLog
    ) -> None:
        self._clock = clock
        self._log = log
        self._limit = int(configs.get("max_request_size", MAX_REQUEST))
        seconds = min(settings.timeout, settings.publish_within)
        self._configs = {
            "max_block_ms": int(seconds * 1000),
            **configs,
            "value_serializer": _Wire(),
        }
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._transactional = configs.get("transactional_id") is not None
        self._client: Any = connected(KafkaProducer, self._configs, Network(log))
        if self._transactional:
            try:
                with translated("starting transactions"):
                    self._client.init_transactions()
            except BaseException:
                self.abandon()
                raise

    def prepare(self, *, located: bool) -> None:
        """Nothing to do: this client's reports are the same for both."""

    def publish(
        self, messages: Sequence[Message], until: float, *, located: bool = True
    ) -> list[Published]:
        """Send all, then wait for each; what failed is tried alone."""
        try:
            results = self._published(messages, until)
        except BrokerDown:
            self._log.fell()
            raise
        self._log.answered()
        return results

    def _published(self, messages: Sequence[Message], until: float) -> list[Published]:
        futures = self._send_all(messages)
        self._flush(until)
        results = [
            self._result(message, future) for message, future in zip(messages, futures, strict=True)
        ]
        failed = [
            place
            for place, (future, result) in enumerate(zip(futures, results, strict=True))
            if result.error is not None
            and (is_open(result) or not isinstance(future, HoldfastError))
        ]
        if failed:
            check_outage(results)
            if self._transactional:
                self._acquit(futures, results)
            else:
                self._try_alone(messages, failed, results, until)
        return results

    def _send_all(self, messages: Sequence[Message]) -> list[Any]:
        """Return what `_send` does for each, up to the first that the client cannot take now."""
        futures: list[Any] = []
        for message in messages:
            futures.append(self._send(message))
            if isinstance(futures[-1], BrokerDown):
                break
        return [*futures, *[UNSENT.error] * (len(messages) - len(futures))]

    def _acquit(self, futures: list[Any], results: list[Published]) -> None:
        """Blame only those that the broker named, if it did.

        What was not sent yet fails with the error of the whole batch that was refused.
        """
        common = self._client._transaction_manager.last_error
        named = [
            is_refused(result) and getattr(future, "exception", None) is not common
            for future, result in zip(futures, results, strict=True)
        ]
        if any(named):
            results[:] = [
                result if is_named or result.error is None else UNSENT
                for result, is_named in zip(results, named, strict=True)
            ]

    def _try_alone(
        self,
        messages: Sequence[Message],
        failed: list[int],
        results: list[Published],
        until: float,
    ) -> None:
        """Send each of *failed* by itself, in order.

        When the broker refuses one message, kafka-python fails everything behind it and is
        of no more use. What failed is all that was left of its lane, so the order holds.
        Without idempotence a client outlives a refusal, and one message at a time needs none.
        """
        if len(failed) == 1 and is_refused(results[failed[0]]):
            self._renew()
            return
        self._renew(enable_idempotence=False, max_in_flight_requests_per_connection=1)
        try_alone(messages, failed, results, partial(self._alone, until=until))
        self._renew()

    def _alone(self, message: Message, until: float) -> Published:
        """Send *message* and wait for it; what went wrong otherwise is its result."""
        if self._clock.monotonic() >= until:
            return UNSENT
        try:
            future = self._send(message)
            self._flush(until)
        except BrokerDown as error:
            return Published(error=error)
        return self._result(message, future)

    def _renew(self, **configs: Any) -> None:
        self.abandon()
        self._client = connected(KafkaProducer, {**self._configs, **configs}, Network(self._log))

    def _flush(self, until: float) -> None:
        with translated("publishing"):
            self._client.flush(timeout=max(until - self._clock.monotonic(), 0.0))

    def _send(self, message: Message) -> Any:
        """Return the client's future, or the error of a message that cannot be sent."""
        try:
            return self._client.send(message.topic, value=message, key=message.key, headers=[])
        except InvalidMessage as error:
            return error
        except KafkaError as error:
            return self._fault(error, message)

    def _result(self, message: Message, future: Any) -> Published:
        if isinstance(future, HoldfastError):
            return Published(error=future)
        if (error := future.exception) is not None:
            return Published(error=self._fault(error, message))
        stored = future.value
        return Published(None, self._lane(stored.topic, stored.partition), stored.offset)

    def _fault(self, error: BaseException, message: Message) -> HoldfastError:
        if isinstance(error, _TOO_LARGE):
            return MessageTooLarge(wire_size(message), self._limit)
        fault = translation(error, "publishing")
        if isinstance(error, FENCED):
            raise fault from error  # about the producer, not about this message
        if isinstance(fault, UnknownTopic):
            fault = UnknownTopic(message.topic, "it was deleted; create it again")
        return fault

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
