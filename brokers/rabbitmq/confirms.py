"""Sending messages with confirms, many at a time."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.brokers.rabbitmq.errors import closed
from holdfast.brokers.rabbitmq.pika_internals import FrameWriter
from holdfast.brokers.rabbitmq.wire import full
from holdfast.brokers.turns import Key, KeyTurns
from holdfast.errors import BrokerDown, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.rabbitmq.connection import ConnectionThread
    from holdfast.clock import Clock

RETURNED, NACKED, BEHIND = "returned", "nacked", "behind one that was nacked"


class Outgoing(NamedTuple):
    """One message, ready to be sent."""

    exchange: str
    routing_key: str
    properties: Any
    body: bytes
    id: str


class ConfirmBatch:
    """Parcels under way; `done` once each is confirmed, or the channel is gone."""

    __slots__ = ("done", "failure", "keys", "left", "parcels", "refused", "turns")

    def __init__(
        self, parcels: Sequence[Outgoing], keys: Sequence[Key | None], window: int
    ) -> None:
        self.parcels = parcels
        self.keys = keys
        self.turns: KeyTurns[int] = KeyTurns(window)
        self.left = len(parcels)
        self.refused: dict[int, str] = {}
        """What was not stored: index and RETURNED (no queue), NACKED or BEHIND (not sent)."""
        self.failure: HoldfastError | None = None
        self.done = threading.Event()

    def fail(self, failure: HoldfastError) -> None:
        """Say that the fate of the unconfirmed parcels is not known."""
        if not self.done.is_set():
            self.failure = failure
            self.done.set()


class ConfirmChannel:
    """A channel in confirm mode, on which parcels leave in the order given.

    Those of one key take turns: the next leaves when the one before it is stored. Every parcel is
    mandatory: one that no queue takes comes back, just before its confirm.
    """

    def __init__(self, link: ConnectionThread) -> None:
        self.link = link
        self.failure: HoldfastError | None = None
        self._channel: Any = None
        self._is_ready = False
        self._waiting: list[ConfirmBatch] = []
        self._under_way: dict[int, tuple[ConfirmBatch, int]] = {}
        self._next: list[tuple[ConfirmBatch, int]] = []
        self._tag = 0
        self._lowest = 1
        link.post(self._open, self._lost)

    @property
    def is_usable(self) -> bool:
        """Whether the channel and its link live."""
        return self.failure is None and self.link.is_alive

    def send(
        self,
        parcels: Sequence[Outgoing],
        keys: Sequence[Key | None] | None = None,
        window: int = 1,
    ) -> ConfirmBatch:
        """Send *parcels*, *window* of each of their *keys* at a time; return at once."""
        batch = ConfirmBatch(parcels, [None] * len(parcels) if keys is None else keys, window)
        self.link.post(partial(self._send, batch), partial(self._abandon, batch))
        return batch

    def cancel(self, batch: ConfirmBatch) -> None:
        """Send nothing more of *batch*; it is done when what is on its way is known."""
        self.link.post(partial(self._cancel, batch))

    def close(self) -> None:
        """Give the channel back; the link goes on."""
        self.link.post(self._leave)

    # -- what follows runs in the link's thread -------------------------------------------

    def _open(self) -> None:
        self._channel = self.link.connection.channel(on_open_callback=self._opened)
        self._channel.add_on_close_callback(self._closed)

    def _opened(self, channel: Any) -> None:
        self._press = FrameWriter(self.link.connection, channel)
        channel.add_on_return_callback(self._returned)
        channel.confirm_delivery(self._confirmed, callback=self._ready)

    def _ready(self, _: Any) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_ready = True
        for batch in waiting:
            self._publish(batch)

    def _send(self, batch: ConfirmBatch) -> None:
        if self.failure is not None:
            batch.fail(self.failure)
        elif self._is_ready:
            self._publish(batch)
        else:
            self._waiting.append(batch)

    def _publish(self, batch: ConfirmBatch) -> None:
        may_go = batch.turns.may_go
        self._emit([(batch, i) for i, key in enumerate(batch.keys) if may_go(key, i)])

    def _emit(self, entries: Sequence[tuple[ConfirmBatch, int]]) -> None:
        first, self._tag = self._tag + 1, self._tag + len(entries)
        self._under_way.update(enumerate(entries, first))
        self._press.publish(batch.parcels[index] for batch, index in entries)

    def _go_on(self) -> None:
        entries, self._next = self._next, []
        if self.failure is None and entries:
            self._emit(entries)

    def _cancel(self, batch: ConfirmBatch) -> None:
        never = [index for one, index in self._next if one is batch]
        self._next = [entry for entry in self._next if entry[0] is not batch]
        self._settle(batch, len(never) + len(batch.turns.forget()))

    def _returned(self, _: Any, __: Any, properties: Any, ___: Any) -> None:
        said = full(properties)
        own = said.message_id or (said.headers or {}).get("cloudEvents:id")
        for batch, index in self._under_way.values():
            if batch.parcels[index].id == own and index not in batch.refused:
                batch.refused[index] = RETURNED
                return

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        tag, stored = method.delivery_tag, method.NAME == "Basic.Ack"
        pop = self._under_way.pop
        if method.multiple:
            lowest, self._lowest = self._lowest, tag + 1
            tags: Sequence[int] = range(lowest, tag + 1)
        else:
            tags = (tag,)
        for one in tags:
            entry = pop(one, None)  # confirmed one by one before
            if entry is not None:
                self._known(*entry, stored)

    def _known(self, batch: ConfirmBatch, index: int, stored: bool) -> None:
        """Note what became of a parcel, and whose turn it is now."""
        key, count = batch.keys[index], 1
        if not stored:
            batch.refused[index] = NACKED
        if index not in batch.refused:
            if (following := batch.turns.stored(key)) is not None:
                self._next.append((batch, following))
                self.link.soon(self._go_on)
        else:
            how = RETURNED if batch.refused[index] == RETURNED else BEHIND
            behind = batch.turns.refused(key)
            batch.refused.update(dict.fromkeys(behind, how))
            count += len(behind)
        self._settle(batch, count)

    def _settle(self, batch: ConfirmBatch, count: int) -> None:
        batch.left -= count
        if batch.left == 0:
            batch.done.set()

    def _closed(self, _: Any, reason: BaseException) -> None:
        self._end(closed(reason))

    def _lost(self) -> None:
        self._end(self.link.failure or BrokerDown("the connection to RabbitMQ is closed"))

    def _abandon(self, batch: ConfirmBatch) -> None:
        batch.fail(self.link.failure or BrokerDown("the connection to RabbitMQ is closed"))

    def _end(self, failure: HoldfastError) -> None:
        self.failure = failure
        for batch in {id(batch): batch for batch, _ in self._under_way.values()}.values():
            batch.fail(failure)
        for batch in (*self._waiting, *(batch for batch, _ in self._next)):
            batch.fail(failure)
        self._next.clear()
        self._under_way.clear()
        self._waiting.clear()

    def _leave(self) -> None:
        if self._channel is not None and self._channel.is_open:
            self._channel.close()


def await_batch(batch: ConfirmBatch, link: ConnectionThread, clock: Clock, patience: float) -> None:
    """Return once *batch* is confirmed; raise when it cannot be, or nothing moves any more."""
    left = -1
    while left != batch.left:
        left = batch.left
        if clock.wait(batch.done, patience):
            if batch.failure is not None:
                raise batch.failure
            return
    raise stalled(link, patience)


def stalled(link: ConnectionThread, patience: float) -> BrokerDown:
    """Return the error for a server that has stopped to confirm."""
    if link.blocked is not None:
        return BrokerDown(
            f"RabbitMQ at {link.address} takes no messages: it has blocked publishers because "
            f"of {link.blocked}; free memory or disk space there"
        )
    return BrokerDown(f"RabbitMQ at {link.address} has confirmed nothing for {patience:g} s")
