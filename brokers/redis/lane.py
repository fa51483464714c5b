"""What one member knows of one lane it owns: decisions only, no I/O.

A group's books of its lanes in Redis: what is handed out, what waits, what is settled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.brokers.groups.lane import LaneBacklog
from holdfast.brokers.redis import scripts
from holdfast.brokers.redis.connection import Command, RedisConnection, evaluation
from holdfast.brokers.redis.wire import unpacked
from holdfast.ports import LaneProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.brokers.redis.broker import Keys, LaneKeys
    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane


def order(position: str) -> tuple[int, int]:
    """Return *position*, the id of a stream entry, as what entries are sorted by."""
    milliseconds, _, sequence = position.partition("-")
    return int(milliseconds), int(sequence or 0)


def before(position: str) -> str:
    """Return the id just before *position*."""
    milliseconds, sequence = order(position)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else "0-0"


@dataclass(frozen=True, slots=True)
class WaitingEntry:
    """An entry to be handed out (again) once due, by the monotonic clock."""

    due: float
    count: int
    key: bytes | None
    order: tuple[int, int]


@dataclass(slots=True)
class RedisLane(LaneBacklog[str, "Delivery", WaitingEntry]):
    """The owner's view of a lane; Redis holds the same, so that a successor can go on."""

    lane: Lane
    keys: LaneKeys
    epoch: int
    member: str
    last: str = "0-0"
    """The newest entry that was ever read for the group."""
    flying: dict[str, Delivery] = field(default_factory=dict)
    waiting: dict[str, WaitingEntry] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """What Redis must hold as the lane's owner for us to change anything."""
        return f"{self.epoch} {self.member}"

    def in_order(self) -> Iterable[str]:
        """Return the positions that wait, in the order of the stream."""
        return sorted(self.waiting, key=lambda position: self.waiting[position].order)

    def came_back(self, position: str, flight: Delivery, due: float, blame: int) -> WaitingEntry:
        """Let the entry wait, with the count of its next delivery."""
        return WaitingEntry(due, (flight.count or 1) + blame, flight.key, order(position))

    def wait(self, position: str, due: float, count: int, key: bytes | None) -> None:
        """Note that an entry is to be handed out once *due*."""
        self.waiting[position] = WaitingEntry(due, count, key, order(position))

    def launch(self, delivery: Delivery) -> None:
        """Note that an entry is handed out."""
        position = str(delivery.position)
        self.waiting.pop(position, None)
        self.flying[position] = delivery


CONSUMER = "holdfast"
_PAGE = 500
_ROOM = 8 << 20  # bytes of one answer, give or take a hundred messages

Entry = tuple[str, list[msgspec.Raw]]
"""The id of a stream entry, and its fields and values."""

_pack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(tuple[list[int], list[tuple[int, list[Entry]]]]).decode
_again = msgspec.msgpack.Decoder(tuple[list[Entry], list[str]]).decode
_page = msgspec.msgpack.Decoder(
    tuple[str, str | bool, list[tuple[str, int, float | bool, msgspec.Raw]]]
).decode


class News(NamedTuple):
    """What reading brought: the entries of each lane, and whether the group has changed."""

    entries: list[tuple[RedisLane, list[Entry]]]
    is_rung: bool


class LaneStore:
    """Reads and writes the books of one group; nothing is done for a lane that is lost."""

    def __init__(self, link: RedisConnection, keys: Keys, group: str, clock: Clock) -> None:
        self._link = link
        self._keys = keys
        self._group = group
        self._bell = keys.group(group).bell
        self._clock = clock

    def is_rung(self, rung: str) -> bool:
        """Whether the group's bell was rung since *rung*."""
        return bool(self._link.call(*self._ring(rung)))

    def read(self, lanes: Sequence[RedisLane], limit: int, rung: str) -> News:
        """Return what was never handed out, at most *limit* entries; it counts as handed out.

        Also look whether the bell was rung since *rung*. What was sent over a connection that
        broke since may reach the server late, and takes nothing then: `load` was before it.
        """
        keys = [key for state in lanes for key in (state.keys.stream, state.keys.state)]
        tokens = [state.token for state in lanes]
        terms = (limit, _ROOM, self._group, CONSUMER, self._link.connected)
        answers = self._link.calls(
            [evaluation(scripts.READ, keys, *terms, *tokens), self._ring(rung)]
        )
        lost, got = _read(answers[0])
        entries = [(lanes[number - 1], page) for number, page in got]
        for state, page in entries:
            state.last = page[-1][0]
        return News(entries, bool(lost) or bool(answers[1]))

    def again(self, wanted: Mapping[str, Sequence[str]], lanes: Sequence[RedisLane]) -> News:
        """Return waiting entries, by the ids that are *wanted* of each stream."""
        asked = [state for state in lanes if wanted.get(state.keys.stream)]
        commands = [
            self._on(scripts.AGAIN, state, self._group, _ROOM, _pack(wanted[state.keys.stream]))
            for state in asked
        ]
        entries: list[tuple[RedisLane, list[Entry]]] = []
        is_lost = False
        for state, answer in zip(asked, self._link.calls(commands), strict=True):
            if answer is None:
                is_lost = True
                continue
            page, gone = _again(answer)
            for position in gone:
                state.waiting.pop(position, None)
            entries.append((state, page))
        return News(entries, is_lost)

    def accept(self, settled: Mapping[str, Sequence[str]], lanes: Iterable[RedisLane]) -> None:
        """Settle the ids of each stream for good."""
        self._link.calls(
            [
                self._on(scripts.ACCEPT, state, self._group, _pack(settled[state.keys.stream]))
                for state in lanes
            ]
        )

    def parking(
        self, state: RedisLane, counts: Mapping[str, int], delay: float = 0.0
    ) -> list[Command]:
        """Return the commands by which entries wait, with the counts of their next delivery."""
        pairs = list(counts.items())
        return [
            self._on(
                scripts.PARK,
                state,
                self._group,
                CONSUMER,
                round(delay * 1000),
                _pack(pairs[first : first + _PAGE]),
            )
            for first in range(0, len(pairs), _PAGE)
        ]

    def park(self, state: RedisLane, counts: Mapping[str, int], delay: float = 0.0) -> None:
        """Let entries wait for *delay* seconds; settled ones stay settled."""
        self._link.calls(self.parking(state, counts, delay))

    def load(self, state: RedisLane, *, blame: bool) -> None:
        """Learn what is pending in the lane, in order.

        What Redis has as handed out, and nobody here holds, waits from now on. With *blame*
        it counts one failure more: its owner died with it.
        """
        self._link.connect()  # before its number is told
        first: str | bool = "-"
        while first:
            terms = (self._group, str(first), _PAGE, self._link.connected)
            answer = self._link.call(*self._on(scripts.PENDING, state, *terms))
            if answer is None:
                return  # lost again; the next look at the group tells
            state.last, last, rows = _page(answer)
            now = self._clock.monotonic()
            orphans: dict[str, int] = {}
            for position, count, due, key in rows:
                if position in state.flying or position in state.waiting:
                    continue
                if due is False:
                    orphans[position] = count + blame
                    state.wait(position, now, count + blame, unpacked(key))
                else:
                    state.wait(position, now + due / 1000, count, unpacked(key))
            if orphans:
                self.park(state, orphans)
            first = last and f"({last}"

    def seek(self, state: RedisLane, last: str) -> int:
        """Move the group to just after *last*; return the new epoch, 0 when the lane is lost."""
        answer = self._link.call(*self._on(scripts.SEEK, state, state.member, self._group, last))
        return int(answer or 0)

    def lags(self, lanes: Sequence[Lane]) -> Mapping[Lane, int]:
        """Return the unsettled messages of each lane: those pending and those never read."""
        return {lane: self._lag(lane, facts) for lane, facts in self._read_to(lanes).items()}

    def introduced(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Return those of *lanes* that the group has read, or was made for."""
        return {lane for lane, (_, _, last) in self._read_to(lanes).items() if last}

    def progress(self, lanes: Sequence[Lane]) -> dict[Lane, LaneProgress]:
        """Return how far the group is in *lanes*: at the start of those that it has not read."""
        known = self._read_to(lanes)
        asked = [
            evaluation(scripts.OLDEST, (self._keys.stream(lane),), self._group, last or "0-0")
            for lane, (_, _, last) in known.items()
        ]
        found: dict[Lane, LaneProgress] = {}
        for (lane, facts), ids in zip(known.items(), self._link.calls(asked), strict=True):
            held, unread, last = (None if one is None else one.decode() for one in ids)
            oldest = min(filter(None, (held, unread)), key=order, default=None)
            found[lane] = LaneProgress(
                unsettled=self._lag(lane, facts),
                committed=oldest or last,
                end=last,
                oldest=None if oldest is None else order(oldest)[0] / 1000,
            )
        return found

    def _read_to(self, lanes: Sequence[Lane]) -> dict[Lane, tuple[int, int | None, bytes]]:
        """Return of each lane how many are pending and how many unread, and the last one read."""
        asked = [evaluation(scripts.GROUP, (self._keys.stream(one),), self._group) for one in lanes]
        return dict(zip(lanes, self._link.calls(asked), strict=True))

    def _lag(self, lane: Lane, facts: tuple[int, int | None, bytes]) -> int:
        pending, unread, last = facts
        # An older server, or one that lost count after a deletion, cannot tell.
        return pending + (self._count(self._keys.stream(lane), last) if unread is None else unread)

    def _count(self, stream: str, last: bytes) -> int:
        total = 0
        while last:
            count, last = self._link.call(*evaluation(scripts.COUNT, (stream,), last))
            total += count
        return total

    def _ring(self, rung: str) -> Command:
        return ("XREAD", "COUNT", 1, "STREAMS", self._bell, rung)

    def _on(self, script: scripts.Script, state: RedisLane, *arguments: Any) -> Command:
        keys = (state.keys.stream, state.keys.state, state.keys.due)
        return evaluation(script, keys, state.token, *arguments)
