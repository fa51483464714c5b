"""Figures for people: ages, bars, a day as a line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_BAR = 16


def age(seconds: float | None) -> str:
    """Return *seconds* in the largest units that say something."""
    if seconds is None:
        return "–"
    left = int(max(0.0, seconds))
    for unit, size, next_unit, next_size in (
        ("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1),
    ):  # fmt: skip
        if left >= size:
            rest = left % size // next_size
            return f"{left // size}{unit} {rest}{next_unit}" if rest else f"{left // size}{unit}"
    return f"{left}s"


def ago(moment: float, now: float) -> str:
    """Return how long ago *moment* was; a clock ahead of ours makes it "now"."""
    return "now" if now - moment < 1 else f"{age(now - moment)} ago"


def when(moment: float | None) -> str:
    """Return *moment* in UTC; one that has no date, as another's clock may say, as it is."""
    if moment is None:
        return "–"
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{moment:g} s since 1970"


def sparkline(counts: Sequence[int]) -> str:
    """Return *counts* as a line of small columns."""
    most = max(counts, default=0)
    if most == 0:
        return "·" * len(counts)
    return "".join(
        "·" if count == 0 else _LEVELS[(count * (len(_LEVELS) - 1)) // most] for count in counts
    )


def bars(counts: Mapping[str, int], *, most: int = 8) -> list[tuple[str, str, int]]:
    """Return name, bar and count of the largest, the rest summed up."""
    rows = list(counts.items())
    shown, rest = rows[:most], sum(count for _, count in rows[most:])
    if rest:
        shown.append((f"({len(rows) - most} more)", rest))
    largest = max((count for _, count in shown), default=0) or 1
    return [(name, "█" * max(1, count * _BAR // largest), count) for name, count in shown]
