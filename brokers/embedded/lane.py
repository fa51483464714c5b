"""What one member knows of one lane it owns: decisions only, no I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.groups.lane import LaneBacklog

if TYPE_CHECKING:
    from holdfast.ports import Lane

SHIFT = 40
"""Bits of an offset inside a message id."""
MASK = (1 << SHIFT) - 1
_LEASE_UNTIL = attrgetter("lease_until")


class DelayedMessage(msgspec.Struct, gc=False):
    """A message that the lane keeps an eye on: handed out, or to be handed out once due."""

    key: bytes | None
    failures: int = 0
    due: float = 0.0
    receipt: int = 0
    lease_until: float = 0.0


@dataclass(slots=True)
class EmbeddedLane(LaneBacklog[int, DelayedMessage, DelayedMessage]):
    """The owner's view of a lane; the tables hold the same, so that a successor can go on.

    Every offset in [committed, fetched) is flying, waiting, or settled ahead of others.
    """

    lane: Lane
    id: int
    epoch: int
    committed: int
    fetched: int
    flying: dict[int, DelayedMessage] = field(default_factory=dict)
    waiting: dict[int, DelayedMessage] = field(default_factory=dict)
    unsaved: list[int] = field(default_factory=list)
    """Offsets settled here and not yet in the tables."""
    marked: bool = False
    """Whether the tables may hold marks below `fetched`."""

    @property
    def first_id(self) -> int:
        """The message id of the next offset never handed out."""
        return (self.id << SHIFT) + self.fetched

    def came_back(
        self, position: int, flight: DelayedMessage, due: float, blame: int
    ) -> DelayedMessage:
        """Let the message wait as it is, with its failures."""
        del position
        flight.due, flight.failures = due, flight.failures + blame
        return flight

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

    def next_expiry(self) -> float | None:
        """Return when the next lease runs out, by the monotonic clock."""
        return min(map(_LEASE_UNTIL, self.flying.values()), default=None)
