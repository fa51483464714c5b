"""Which transactions a snapshot sees: where the table's rows end and the stream's begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_HALF, _WHOLE = 1 << 31, 1 << 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `pg_current_snapshot()` says: everything below `xmin`, nothing from `xmax` on."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot written as `xmin:xmax:running,…`."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Whether the effects of the committed transaction *xid* are visible.

        The stream has only the lower 32 bits of the number; the full one is that nearest
        to the snapshot.
        """
        full = self.xmax + (xid - self.xmax + _HALF) % _WHOLE - _HALF
        return full < self.xmin or (full < self.xmax and full not in self.running)

    def sees_all(self, xids: Iterable[int]) -> bool:
        """Whether every one of *xids* is visible."""
        return all(map(self.sees, xids))
