"""Publishing to RabbitMQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.brokers.groups.lane import Spread
from holdfast.brokers.rabbitmq.confirms import (
    BEHIND,
    RETURNED,
    ConfirmBatch,
    ConfirmChannel,
    Outgoing,
    await_batch,
    stalled,
)
from holdfast.brokers.rabbitmq.errors import ChannelRefused, QueueNotFound
from holdfast.brokers.rabbitmq.topology import Topology
from holdfast.brokers.rabbitmq.wire import sealed
from holdfast.brokers.turns import Key, turn_of
from holdfast.errors import (
    BrokerDown,
    HoldfastError,
    InvalidMessage,
    Transient,
    UnknownTopic,
    Unsupported,
)
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.rabbitmq.connection import ConnectionThread, Reconnector
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock
    from holdfast.message import Message

_GLANCE = 0.01
_Route = tuple[Lane, str]


class RabbitSink:
    """Sends each batch at once and waits for its confirms together.

    A message is stored when the queues of all groups have it on disk. After `BrokerDown`
    nothing more is sent until the fate of what was sent is known or the connection is
    lost, so a batch that is published again never overtakes its first attempt.
    """

    def __init__(self, line: Reconnector, settings: RabbitSettings, clock: Clock) -> None:
        self.caps = settings.caps()
        self._line = line
        self._settings = settings
        self._clock = clock
        self._spread = Spread()
        self._routes: dict[str, tuple[_Route, ...]] = {}
        self._outlet: ConfirmChannel | None = None
        self._last: ConfirmBatch | None = None
        self._topology: Topology | None = None
        self._is_closed = False
        self._connect()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Send *messages*; one that cannot be stored gets its error, the others are stored."""
        if self._is_closed:
            raise Unsupported("be used after close()", "this sink", "make a new one")
        outlet = self._connect()
        self._await_room(outlet)
        results, parcels, indexes = self._packed(messages)
        if not parcels:
            return results
        keys = [turn_of(messages[index].topic, messages[index].key) for index in indexes]
        self._last = batch = outlet.send(parcels, keys, self._settings.key_window)
        try:
            await_batch(batch, outlet.link, self._clock, self._settings.patience)
        except (QueueNotFound, ChannelRefused) as error:
            return self._one_by_one(messages, error)
        except BrokerDown:
            outlet.cancel(batch)
            raise
        self._note_refusals(batch, indexes, messages, results)
        return results

    def _packed(
        self, messages: Sequence[Message]
    ) -> tuple[list[Published], list[Outgoing], list[int]]:
        """Return a result for each message, and the parcels of those that can be sent."""
        stamp = int(self._clock.now().timestamp())
        most, headers = self._settings.max_message, self._max_headers
        results: list[Published] = []
        parcels: list[Outgoing] = []
        indexes: list[int] = []
        for index, message in enumerate(messages):
            try:
                routes = self._routes.get(message.topic) or self._learn(message.topic)
                lane, key = routes[self._spread.lane(message.key, len(routes))]
                properties = sealed(message, stamp, most, headers)
            except BrokerDown:
                raise
            except HoldfastError as error:
                results.append(Published(error))
            else:
                results.append(Published(None, lane, message.id))
                body = message.payload
                parcels.append(
                    Outgoing(lane.topic, key, properties, b"" if body is None else body, message.id)
                )
                indexes.append(index)
        return results, parcels, indexes

    def _note_refusals(
        self,
        batch: ConfirmBatch,
        indexes: Sequence[int],
        messages: Sequence[Message],
        results: list[Published],
    ) -> None:
        for number, how in batch.refused.items():
            index = indexes[number]
            topic = messages[index].topic
            if how == RETURNED:
                fix = (
                    "no consumer group would get the message, so it was not stored; run  holdfast "
                    "group create, call broker.create_group() or start a consumer once"
                )
                results[index] = Published(UnknownTopic(topic, fix))
            elif how == BEHIND:
                results[index] = Published(_behind())
            else:
                results[index] = Published(Transient(f"RabbitMQ could not store it in {topic!r}"))

    def _one_by_one(
        self, messages: Sequence[Message], error: QueueNotFound | ChannelRefused
    ) -> list[Published]:
        """Find out which message the broker closed the channel over.

        What came before it may be stored twice: its confirm went with the channel.
        """
        self._routes.clear()
        self._topology = None
        if len(messages) > 1:
            return self._in_turn(messages)
        if isinstance(error, QueueNotFound):
            return [Published(UnknownTopic(messages[0].topic, f"it was deleted ({error})"))]
        return [Published(InvalidMessage(f"RabbitMQ refuses the message: {error}"))]

    def _in_turn(self, messages: Sequence[Message]) -> list[Published]:
        """Publish one after the other, and nothing behind one of its key that may pass later."""
        results: list[Published] = []
        held: set[Key] = set()
        for message in messages:
            turn = turn_of(message.topic, message.key)
            if turn in held:
                results.append(Published(_behind()))
                continue
            [result] = self.publish([message])
            if isinstance(result.error, Transient) and turn is not None:
                held.add(turn)
            results.append(result)
        return results

    def _connect(self) -> ConfirmChannel:
        link = self._line.link(self._settings.patience)
        if self._outlet is None or self._outlet.link is not link:
            self._topology = None
            # The server may have asked for smaller frames than this side would send.
            agreed = link.connection.params.frame_max // 2
            self._max_headers = min(agreed, self.caps.max_headers or agreed)
        if self._outlet is None or not self._outlet.is_usable:
            self._outlet = ConfirmChannel(link)
        return self._outlet

    def _await_room(self, outlet: ConfirmChannel) -> None:
        """Wait while an earlier batch hangs, or the server is blocked: nothing piles up here."""
        patience = self._settings.patience
        if self._last is not None and not self._clock.wait(self._last.done, patience):
            raise stalled(outlet.link, patience)
        until = self._clock.monotonic() + patience
        while outlet.link.blocked is not None and outlet.is_usable:
            if self._clock.monotonic() >= until:
                raise stalled(outlet.link, patience)
            self._clock.sleep(_GLANCE)

    def _learn(self, topic: str) -> tuple[_Route, ...]:
        if self._topology is None:
            self._topology = Topology(self._link(), self._settings, self._clock)
        lanes = self._topology.lanes(topic)
        routes = tuple((Lane(topic, n), str(n)) for n in range(lanes))
        self._routes[topic] = routes
        return routes

    def _link(self) -> ConnectionThread:
        return self._line.link(self._settings.patience)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._line.close()


def _behind() -> Transient:
    return Transient("not sent: RabbitMQ could not store an earlier message of its key")
