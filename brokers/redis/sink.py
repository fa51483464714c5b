"""Publishing to Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.groups.lane import Spread
from holdfast.brokers.redis.errors import translation
from holdfast.brokers.redis.scripts import PUBLISH
from holdfast.brokers.redis.wire import encoded
from holdfast.errors import ConfigurationError, HoldfastError, InvalidMessage, Unsupported
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.redis.broker import Keys, RedisTopics
    from holdfast.brokers.redis.connection import RedisConnection
    from holdfast.message import Message
    from holdfast.ports import Caps

_MOST_BYTES = 32 << 20
_MOST_MESSAGES = 10_000  # the server does nothing else while it stores a batch
_ids = msgspec.msgpack.Decoder(list[str]).decode


class RedisSink:
    """Stores each batch in one atomic step: all messages that can be stored, or none.

    A batch of more than 10,000 messages or 32 MiB is stored in several such steps, in order.
    """

    def __init__(self, link: RedisConnection, keys: Keys, topics: RedisTopics, caps: Caps) -> None:
        self.caps = caps
        self._link = link
        self._keys = keys
        self._topics = topics
        self._spread = Spread()
        self._streams: dict[Lane, bytes] = {}
        self._is_closed = False

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Store *messages*; one that cannot be stored gets its error, the others are stored."""
        if self._is_closed:
            raise Unsupported("be used after close()", "this sink", "make a new one")
        results: list[Published] = [_REFUSED] * len(messages)
        batch = PublishBatch()
        for index, message in enumerate(messages):
            try:
                fields = encoded(message, self.caps.max_message or 0)
                lane = self._lane(message)
            except (InvalidMessage, ConfigurationError) as error:
                results[index] = Published(error)
                continue
            batch.add(index, lane, self._streams[lane], fields)
            if batch.size >= _MOST_BYTES or len(batch.indexes) >= _MOST_MESSAGES:
                self._store(batch, results)
                batch = PublishBatch()
        if batch.indexes:
            self._store(batch, results)
        return results

    def _lane(self, message: Message) -> Lane:
        topic = message.topic
        lane = Lane(topic, self._spread.lane(message.key, self._topics.lanes(topic)))
        if lane not in self._streams:
            self._streams[lane] = self._keys.stream(lane).encode()
        return lane

    def _store(self, batch: PublishBatch, results: list[Published]) -> None:
        self._link.send_packed([batch.command()])
        ids = _ids(self._link.answers(1)[0])
        for index, lane, position in zip(batch.indexes, batch.lanes, ids, strict=True):
            if position[0] == "!":
                error = translation(Exception(position[1:]), self._link.name)
                results[index] = Published(error)
            else:
                results[index] = Published(None, lane, position)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._link.disconnect()


class PublishBatch:
    """Messages on their way, packed as the arguments of one command.

    Packed here and not by redis-py, which takes as long for it as for all the rest.
    """

    __slots__ = ("_arguments", "_count", "_numbers", "_streams", "indexes", "lanes", "size")

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self.lanes: list[Lane] = []
        self.size = 0
        self._count = 0
        self._arguments: list[bytes] = []
        self._streams: list[bytes] = []
        self._numbers: dict[Lane, bytes] = {}

    def add(self, index: int, lane: Lane, stream: bytes, fields: list[bytes]) -> None:
        """Append the message at *index* of the caller's batch."""
        number = self._numbers.get(lane)
        if number is None:
            self._streams.append(stream)
            self._numbers[lane] = number = _bulk(b"%d" % len(self._streams))
        self.indexes.append(index)
        self.lanes.append(lane)
        packed = b"".join([b"$%d\r\n%b\r\n" % (len(field), field) for field in fields])
        self._arguments += (number, b"$1\r\n%d\r\n" % len(fields), packed)
        self._count += 2 + len(fields)
        self.size += len(packed)

    def command(self) -> bytes:
        """Return the command that stores the batch, as it goes over the wire."""
        keys = [_bulk(b"%d" % len(self._streams)), *map(_bulk, self._streams)]
        head = b"*%d\r\n$7\r\nEVALSHA\r\n" % (2 + len(keys) + self._count)
        return b"".join([head, _bulk(PUBLISH.sha.encode()), *keys, *self._arguments])


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


_REFUSED = Published(error=HoldfastError("not published"))
