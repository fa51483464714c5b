"""The lanes of a topic: which one a key belongs to, and what of it waits; no I/O."""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_WAITING = 10_000
"""Messages of one lane; beyond it the lane hands out nothing new, so that memory stays bounded."""


class Waiting(Protocol):
    """A message to be handed out (again) once due, by the monotonic clock."""

    @property
    def key(self) -> bytes | None:
        """Whose order it keeps; None if nobody's."""
        ...

    @property
    def due(self) -> float:
        """When it may be handed out."""
        ...


P = TypeVar("P", int, str)
F = TypeVar("F")
W = TypeVar("W", bound=Waiting)


class LaneBacklog(ABC, Generic[P, F, W]):
    """The messages of a lane that are handed out, and those that wait; no key overtakes itself."""

    __slots__ = ()

    flying: dict[P, F]
    """Handed out and not settled."""
    waiting: dict[P, W]
    """To be handed out, before anything new of their keys."""

    def in_order(self) -> Iterable[P]:
        """Return the positions that wait, in the order of the lane."""
        return sorted(self.waiting)

    @abstractmethod
    def came_back(self, position: P, flight: F, due: float, blame: int) -> W:
        """Return what waits for a message that was handed out as *flight*, to blame or not."""

    def land(self, position: P, due: float, blame: int = 0) -> W:
        """Note that *position* came back unsettled and is to be handed out again once *due*."""
        held = self.came_back(position, self.flying.pop(position), due, blame)
        self.waiting[position] = held
        return held

    def due(self, now: float, limit: int) -> list[P]:
        """Return what waits and may be handed out, in order, none past an undue one of its key."""
        if not self.waiting:
            return []
        held: set[bytes] = set()
        ready: list[P] = []
        for position in self.in_order():
            entry = self.waiting[position]
            if entry.due > now or entry.key in held:
                if entry.key is not None:
                    held.add(entry.key)
            elif len(ready) < limit:
                ready.append(position)
        return ready

    def held_keys(self) -> set[bytes]:
        """Return the keys of which a message still waits: what is new of them waits behind it.

        No clock is asked: what falls due after `due` was asked has not been handed out either.
        """
        return {w.key for w in self.waiting.values() if w.key is not None}

    def next_due(self) -> float | None:
        """Return when a waiting message can be handed out: the first of its key, once due."""
        if not self.waiting:
            return None
        first: dict[bytes | P, float] = {}
        for position in self.in_order():
            entry = self.waiting[position]
            first.setdefault(position if entry.key is None else entry.key, entry.due)
        return min(first.values(), default=None)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing new may be read."""
        return len(self.waiting) >= MOST_WAITING


class Spread:
    """Gives each key one lane for good, and keyless messages each lane in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def lane(self, key: bytes | None, lanes: int) -> int:
        """Return the partition of *key* among *lanes*: the same for all processes and times."""
        return (next(self._turns) if key is None else zlib.crc32(key)) % lanes
