"""How much to read at a time: rows may be of a hundred bytes or of a megabyte."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_BYTES = 16 << 20
_FIRST, _GROWTH = 16, 4


class Portion:
    """Says how many rows to ask for, at most *most*, so that some 16 MB come.

    It begins with few and asks for more as it learns their size: a relay that was killed for
    its memory would otherwise read the same rows at once after every restart.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows = min(most, _FIRST)
        """How many to ask for now."""

    def came(self, rows: int, size: int) -> None:
        """Note that *rows* came, of *size* bytes together."""
        if rows:
            fitting = rows * MOST_BYTES // max(size, 1)
            self.rows = max(1, min(self._most, fitting, self.rows * _GROWTH))


def fitting(sizes: Iterable[tuple[int, int | None]]) -> list[int]:
    """Return the first of the numbered *sizes* that make 16 MB together; always one."""
    chosen: list[int] = []
    total = 0
    for number, size in sizes:
        total += size or 0
        if chosen and total > MOST_BYTES:
            break
        chosen.append(number)
    return chosen
