"""What one member knows of one lane it owns: decisions only, no I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.ports import Lane

SHIFT = 40
"""Bits of an offset inside a message id."""
MASK = (1 << SHIFT) - 1


class Held(msgspec.Struct, gc=False):
    """A message that the lane keeps an eye on: handed out, or to be handed out once due."""

    key: bytes | None
    failures: int = 0
    due: float = 0.0
    receipt: int = 0
    lease_until: float = 0.0


@dataclass(slots=True)
class LaneState:
    """The owner's view of a lane; the tables hold the same, so that a successor can go on.

    Every offset in [committed, fetched) is flying, waiting, or settled ahead of others.
    """

    lane: Lane
    id: int
    epoch: int
    committed: int
    fetched: int
    flying: dict[int, Held] = field(default_factory=dict)
    waiting: dict[int, Held] = field(default_factory=dict)
    unsaved: list[int] = field(default_factory=list)
    """Offsets settled here and not yet in the tables."""
    marked: bool = False
    """Whether the tables may hold marks below `fetched`."""

    @property
    def first_id(self) -> int:
        """The message id of the next offset never handed out."""
        return (self.id << SHIFT) + self.fetched

    def due(self, now: float, limit: int) -> list[int]:
        """Return the waiting offsets to hand out, in order, none past an undue one of its key."""
        held: set[bytes] = set()
        ready: list[int] = []
        for offset in sorted(self.waiting):
            entry = self.waiting[offset]
            if entry.due > now or entry.key in held:
                if entry.key is not None:
                    held.add(entry.key)
            elif len(ready) < limit:
                ready.append(offset)
        return ready

    def held_keys(self, now: float) -> set[bytes]:
        """Return the keys whose earlier message still waits: their later ones wait too."""
        return {w.key for w in self.waiting.values() if w.key is not None and w.due > now}

    def land(self, offset: int, due: float, blame: int = 0) -> Held:
        """Note that *offset* came back unsettled and is to be handed out again once *due*."""
        self.waiting[offset] = held = self.flying.pop(offset)
        held.due, held.failures = due, held.failures + blame
        return held

    def settle(self) -> list[int]:
        """Move `committed` up to the first unfinished offset; return what is settled ahead."""
        unfinished = itertools.chain(self.flying, self.waiting)
        self.committed = min(unfinished, default=self.fetched)
        return [offset for offset in self.unsaved if offset >= self.committed]

    def expired(self, monotonic: float) -> list[int]:
        """Return the offsets whose lease has run out."""
        return [o for o, flight in self.flying.items() if flight.lease_until <= monotonic]

    def behind(self, offsets: list[int]) -> list[int]:
        """Return what is handed out behind *offsets* of their keys: it may not overtake them."""
        first: dict[bytes, int] = {}
        for offset in sorted(offsets):
            if (key := self.flying[offset].key) is not None:
                first.setdefault(key, offset)
        lost = set(offsets)
        return [
            offset
            for offset, flight in self.flying.items()
            if flight.key in first and offset > first[flight.key] and offset not in lost
        ]

    def next_due(self) -> float | None:
        """Return when a waiting message can be handed out: the first of its key, once due."""
        first: dict[bytes | int, float] = {}
        for offset in sorted(self.waiting):
            held = self.waiting[offset]
            first.setdefault(offset if held.key is None else held.key, held.due)
        return min(first.values(), default=None)

    def next_expiry(self) -> float | None:
        """Return when the next lease runs out, by the monotonic clock."""
        return min((f.lease_until for f in self.flying.values()), default=None)
