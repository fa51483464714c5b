"""The contiguous watermark: what may be committed on a cumulative broker."""

from __future__ import annotations

import heapq


class Watermark:
    """Tracks offsets handed out and done; never passes one that is unfinished.

    A cumulative broker forgets everything below the committed offset, so committing past
    an unfinished message loses it. Gaps that the broker never handed out (compacted
    records, transaction markers) do not hold the watermark back.
    """

    __slots__ = ("_highest", "_order", "_unfinished")

    def __init__(self) -> None:
        self._unfinished: set[int] = set()
        self._order: list[int] = []  # heap over the unfinished; finished ones leave lazily
        self._highest = -1

    def start(self, offset: int) -> None:
        """Note that *offset* was handed out, perhaps again; an earlier one moves back to it."""
        if offset not in self._unfinished:
            self._unfinished.add(offset)
            heapq.heappush(self._order, offset)
            self._highest = max(self._highest, offset)

    def finish(self, offset: int) -> None:
        """Note that *offset* is settled for good; once more, or unheard of, changes nothing."""
        self._unfinished.discard(offset)

    def position(self) -> int | None:
        """Return the lowest offset that must be read again after a crash; None before any."""
        while self._order and self._order[0] not in self._unfinished:
            heapq.heappop(self._order)
        if self._order:
            return self._order[0]
        return None if self._highest < 0 else self._highest + 1

    @property
    def unfinished(self) -> int:
        """How many offsets are handed out and not yet settled."""
        return len(self._unfinished)
