"""Publishing to the embedded broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.embedded.lane import SHIFT
from holdfast.brokers.groups.lane import Spread
from holdfast.cloudevents import wire_list
from holdfast.errors import HoldfastError, MessageTooLarge
from holdfast.ports import Lane, Published

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.brokers.embedded.store import EmbeddedTopics, StoreSession
    from holdfast.clock import Clock
    from holdfast.message import Message
    from holdfast.ports import Caps

_pack = msgspec.msgpack.Encoder().encode


class PublishSlot:
    """One lane of a topic and the rows of the batch that go there."""

    __slots__ = ("id", "indexes", "lane", "rows")

    def __init__(self, lane: Lane, lane_id: int) -> None:
        self.lane = lane
        self.id = lane_id
        self.rows: list[tuple[bytes | None, bytes, bytes | None]] = []
        self.indexes: list[int] = []


class EmbeddedSink:
    """Stores each batch in one transaction: all messages that can be stored, or none."""

    def __init__(
        self,
        session: StoreSession,
        topics: EmbeddedTopics,
        caps: Caps,
        clock: Clock,
    ) -> None:
        self.caps = caps
        self._db = session
        self._known = topics
        self._clock = clock
        self._spread = Spread().lane
        self._topics: dict[str, list[PublishSlot]] = {}

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Store *messages*; one that cannot be stored gets its error, the others are stored."""
        results: list[Published] = [_REFUSED] * len(messages)
        used: dict[int, PublishSlot] = {}
        try:
            self._place(messages, used, results)
            if used:
                self._store(used.values(), results)
        finally:
            for slot in used.values():
                slot.rows, slot.indexes = [], []
        return results

    def _place(
        self, messages: Sequence[Message], used: dict[int, PublishSlot], results: list[Published]
    ) -> None:
        """Sort *messages* to their lanes, in one frame: this is the hot path."""
        limit = float("inf") if self.caps.max_message is None else self.caps.max_message
        topics, spread = self._topics, self._spread
        for index, message in enumerate(messages):
            key, body = message.key, message.payload
            try:
                headers = _pack(wire_list(message))
                size = len(headers) + len(body or b"") + len(key or b"")
                if size > limit:
                    raise MessageTooLarge(size, int(limit))
                slots = topics.get(message.topic) or self._learn(message.topic)
            except HoldfastError as error:
                results[index] = Published(error)
                continue
            slot = slots[spread(key, len(slots))]
            used[slot.id] = slot
            slot.rows.append((key, headers, body))
            slot.indexes.append(index)

    def _learn(self, topic: str) -> list[PublishSlot]:
        lanes = sorted(self._known.lanes(topic).items())
        self._topics[topic] = slots = [PublishSlot(Lane(topic, n), lane_id) for n, lane_id in lanes]
        return slots

    def _store(self, used: Iterable[PublishSlot], results: list[Published]) -> None:
        stored = self._clock.now().timestamp()
        with self._db.write() as db:
            for slot in used:
                count = len(slot.rows)
                (end,) = db.execute(
                    "UPDATE hf_lane SET next = next + ? WHERE id = ? RETURNING next",
                    (count, slot.id),
                ).fetchone()
                first = end - count
                base = (slot.id << SHIFT) + first
                db.executemany(
                    "INSERT INTO hf_message (id, key, headers, body, stored)"
                    " VALUES (?, ?, ?, ?, ?)",
                    [(base + i, k, h, b, stored) for i, (k, h, b) in enumerate(slot.rows)],
                )
                for offset, index in enumerate(slot.indexes, first):
                    results[index] = Published(None, slot.lane, offset)

    def close(self) -> None:
        """Close the session."""
        self._db.close()


_REFUSED = Published(error=HoldfastError("not published"))
