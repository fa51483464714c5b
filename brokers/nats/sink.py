"""Publishing to NATS JetStream: many messages on their way, each confirmed or refused."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.groups.lane import Spread
from holdfast.brokers.nats.connection import patiently
from holdfast.brokers.nats.errors import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE, JetStreamRefusal
from holdfast.brokers.nats.jetstream import headers_of, size_of
from holdfast.brokers.nats.streams import subject
from holdfast.brokers.turns import Key, KeyTurns, turn_of
from holdfast.errors import BrokerDown, HoldfastError, MessageTooLarge, Unsupported
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from holdfast.brokers.nats.broker import NatsSettings
    from holdfast.brokers.nats.connection import Connection
    from holdfast.brokers.nats.streams import NatsTopics
    from holdfast.message import Message
    from holdfast.ports import Caps

WINDOW = 512
"""Messages on their way that are not yet confirmed."""


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: dict[str, int | str] | None = None


_ack = msgspec.json.Decoder(_Ack).decode


class _Parcel(msgspec.Struct, gc=False):
    """A message on its way."""

    index: int
    lane: Lane
    subject: str
    headers: dict[str, str]
    payload: bytes
    turn: Key | None


class NatsSink:
    """Sends batches in order over one connection and waits for every confirmation.

    The server stores what one connection sends in the order sent, but it may refuse a message
    and take the next, or lose it with a leader. So those of one key take turns: the next is sent
    when the one before it is stored. When the server refuses a message, later ones of that lane
    which are not yet on their way are not sent. The first message of a lane by a new connection
    goes alone, for that is when a server may not be ready yet.
    """

    def __init__(
        self, connection: Connection, topics: NatsTopics, caps: Caps, settings: NatsSettings
    ) -> None:
        limit = min(caps.max_message or 0, connection.max_payload)
        self.caps = replace(caps, max_message=limit)
        self._limit = limit
        self._connection = connection
        self._topics = topics
        self._timeout = settings.timeout
        self._key_window = settings.key_window
        self._spread = Spread()
        self._lanes: dict[str, tuple[tuple[Lane, str], ...]] = {}
        self._inbox = ""
        self._set_up = 0
        self._sent = 0
        self._proven: set[Lane] = set()
        self._batch: _Batch | None = None
        self._is_closed = False

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Store *messages*; one that cannot be stored gets its error, the others are stored."""
        if self._is_closed:
            raise Unsupported("be used after close()", "this sink", "make a new one")
        self._up()
        results: list[Published] = [_REFUSED] * len(messages)
        parcels: list[_Parcel] = []
        for index, message in enumerate(messages):
            try:
                parcels.append(self._parcel(index, message))
            except BrokerDown:
                raise
            except HoldfastError as error:
                results[index] = Published(error)
        if parcels:
            self._send(parcels, results)
        return results

    def close(self) -> None:
        """End the connection; what `publish` returned for is stored."""
        self._is_closed = True
        self._connection.close()

    def _parcel(self, index: int, message: Message) -> _Parcel:
        headers = headers_of(message)
        payload = message.payload or b""
        size = size_of(headers)
        if self.caps.max_headers is not None and size > self.caps.max_headers:
            raise MessageTooLarge(size, self.caps.max_headers, "headers")
        if size + len(payload) > self._limit:
            raise MessageTooLarge(size + len(payload), self._limit)
        lanes = self._lanes.get(message.topic) or self._learn(message.topic)
        lane, to = lanes[self._spread.lane(message.key, len(lanes))]
        return _Parcel(index, lane, to, headers, payload, turn_of(message.topic, message.key))

    def _learn(self, topic: str) -> tuple[tuple[Lane, str], ...]:
        count = self._topics.lanes(topic)
        lanes = tuple((Lane(topic, n), subject(topic, n)) for n in range(count))
        self._lanes[topic] = lanes
        return lanes

    def _up(self) -> None:
        self._connection.ensure()
        if self._set_up != self._connection.generation:

            async def listen(client: Client) -> str:
                inbox: str = client.new_inbox()
                await client.subscribe(f"{inbox}.*", cb=self._hear)
                return f"{inbox}."

            self._inbox = self._connection.run(listen)
            self._proven.clear()
            self._set_up = self._connection.generation

    def _send(self, parcels: list[_Parcel], results: list[Published]) -> None:
        self._batch = batch = _Batch(parcels, results, self._sent, self._proven, self._key_window)
        self._sent += len(parcels)
        try:
            self._connection.run(lambda client: batch.send(client, self._inbox, self._timeout))
        except HoldfastError:
            # It may be half open, so the next publish takes another one. What the old one
            # still brings to the server is known there by its id.
            self._connection.drop()
            raise
        finally:
            self._batch = None
        for topic in batch.unknown:
            self._lanes.pop(topic, None)

    async def _hear(self, message: Msg) -> None:
        if self._batch is not None:
            number = int(message.subject[len(self._inbox) :])
            self._batch.hear(number, message)


class _Batch:
    """The messages of one `publish`, on the event loop."""

    def __init__(
        self,
        parcels: list[_Parcel],
        results: list[Published],
        first: int,
        proven: set[Lane],
        window: int,
    ) -> None:
        self.unknown: set[str] = set()
        self._parcels = parcels
        self._results = results
        self._first = first
        self._proven = proven
        self._open = 0
        self._turns: KeyTurns[int] = KeyTurns(window)
        self._next: deque[int] = deque()
        self._blocked: dict[Lane, HoldfastError] = {}
        self._moved = asyncio.Event()

    async def send(self, client: Client, inbox: str, timeout: float) -> None:
        """Return once each message has its result; the server may be silent for *timeout*."""
        for place, parcel in enumerate(self._parcels):
            if parcel.lane in self._blocked:
                self._hold_back(place)
            elif self._turns.may_go(parcel.turn, place):
                await self._send(client, inbox, place)
                # The first of a lane goes alone: a server may not be ready yet.
                while self._open >= (WINDOW if parcel.lane in self._proven else 1):
                    await self._progress(timeout)
                if parcel.lane not in self._blocked:
                    self._proven.add(parcel.lane)
            while self._next:
                await self._send(client, inbox, self._next.popleft())
        while self._open or self._next:
            if not self._next:
                await self._progress(timeout)
            while self._next:
                await self._send(client, inbox, self._next.popleft())

    async def _send(self, client: Client, inbox: str, place: int) -> None:
        parcel = self._parcels[place]
        if parcel.lane in self._blocked:
            self._hold_back(place)
            for behind in self._turns.refused(parcel.turn):
                self._hold_back(behind)
            return
        self._open += 1
        reply = f"{inbox}{self._first + place}"
        await client.publish(parcel.subject, parcel.payload, reply, parcel.headers)

    def _hold_back(self, place: int) -> None:
        """Give a message that is not sent its result."""
        parcel = self._parcels[place]
        self._results[parcel.index] = Published(_behind(self._blocked[parcel.lane]))

    async def _progress(self, timeout: float) -> None:
        self._moved.clear()
        what = f"{self._open} messages are not confirmed"
        await patiently(self._moved, timeout, what)

    def hear(self, number: int, message: Msg) -> None:
        """Note what became of one message."""
        index = number - self._first
        if not 0 <= index < len(self._parcels):
            return
        parcel = self._parcels[index]
        if (error := self._refusal(parcel, message)) is None:
            ack = _ack(message.data)
            # A message without key may have been stored in another lane the first time.
            lane = parcel.lane if parcel.turn is not None or not ack.duplicate else None
            self._results[parcel.index] = Published(None, lane, ack.seq)
            if (following := self._turns.stored(parcel.turn)) is not None:
                self._next.append(following)
        else:
            self._results[parcel.index] = Published(error)
            self._blocked.setdefault(parcel.lane, error)
            self._proven.discard(parcel.lane)
            for behind in self._turns.refused(parcel.turn):
                self._hold_back(behind)
        self._open -= 1
        self._moved.set()

    def _refusal(self, parcel: _Parcel, message: Msg) -> HoldfastError | None:
        if not message.data:  # nobody listens there: the stream is gone, or not yet recovered
            self.unknown.add(parcel.lane.topic)
            return BrokerDown(f"NATS has no stream for {parcel.lane} at the moment")
        error = _ack(message.data).error
        if error is None:
            return None
        refusal = JetStreamRefusal(f"publish to {parcel.lane}", error)
        if refusal.number in {MESSAGE_TOO_LARGE, HEADERS_TOO_LARGE}:
            size = len(parcel.payload) + size_of(parcel.headers)
            return MessageTooLarge(size, 0, "message for this stream's max_msg_size,")
        return refusal.translated()


def _behind(error: HoldfastError) -> HoldfastError:
    return BrokerDown(f"not sent, to stay behind an earlier message of its lane: {error}")


_REFUSED = Published(error=HoldfastError("not published"))
