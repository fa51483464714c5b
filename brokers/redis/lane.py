"""What one member knows of one lane it owns: decisions only, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.brokers.redis.keys import LaneKeys
    from holdfast.ports import Delivery, Lane


_MOST_WAITING = 10_000  # beyond it a lane hands out nothing new: memory stays bounded


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
class Waiting:
    """An entry to be handed out (again) once due, by the monotonic clock."""

    due: float
    count: int
    key: bytes | None
    order: tuple[int, int]


@dataclass(slots=True)
class LaneState:
    """The owner's view of a lane; Redis holds the same, so that a successor can go on."""

    lane: Lane
    keys: LaneKeys
    epoch: int
    member: str
    last: str = "0-0"
    """The newest entry that was ever read for the group."""
    flying: dict[str, Delivery] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """What Redis must hold as the lane's owner for us to change anything."""
        return f"{self.epoch} {self.member}"

    def due(self, now: float, limit: int) -> list[str]:
        """Return the waiting entries to hand out, in order, none past an undue one of its key."""
        held: set[bytes] = set()
        ready: list[str] = []
        for position, entry in sorted(self.waiting.items(), key=lambda item: item[1].order):
            if entry.due > now or entry.key in held:
                if entry.key is not None:
                    held.add(entry.key)
            elif len(ready) < limit:
                ready.append(position)
        return ready

    def held_keys(self, now: float) -> set[bytes]:
        """Return the keys whose earlier message still waits: their later ones wait too."""
        return {w.key for w in self.waiting.values() if w.key is not None and w.due > now}

    def wait(self, position: str, due: float, count: int, key: bytes | None) -> None:
        """Note that an entry is to be handed out once *due*."""
        self.waiting[position] = Waiting(due, count, key, order(position))

    def launch(self, delivery: Delivery) -> None:
        """Note that an entry is handed out."""
        position = str(delivery.position)
        self.waiting.pop(position, None)
        self.flying[position] = delivery

    def land(self, position: str, due: float, count: int) -> None:
        """Note that an entry came back and is to be handed out again once *due*."""
        self.wait(position, due, count, self.flying.pop(position).key)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing new may be read."""
        return len(self.waiting) >= _MOST_WAITING

    def next_due(self) -> float | None:
        """Return when the next waiting entry can be handed out: the first one of some key."""
        firsts: dict[object, float] = {}
        for position, entry in sorted(self.waiting.items(), key=lambda item: item[1].order):
            firsts.setdefault(position if entry.key is None else entry.key, entry.due)
        return min(firsts.values(), default=None)
