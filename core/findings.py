"""What a look at something found: how bad it is, in words, with the fix and the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Severity(IntEnum):
    """How bad it is, the worst last."""

    OK = 0
    UNSEEN = 1
    """It could not be looked at: nobody knows."""
    WARNING = 2
    """Wants attention soon."""
    CRITICAL = 3
    """Wants attention now."""
    DOWN = 4
    """The database or the broker does not answer."""

    @classmethod
    def of(cls, value: float, warning: float, critical: float) -> Severity:
        """Return the severity of *value* by the two limits, which count as reached."""
        if value >= critical:
            return cls.CRITICAL
        return cls.WARNING if value >= warning else cls.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    severity: Severity
    text: str
    fix: str | None = None
    """What to do; every finding that is not OK has one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The figures behind the text, for scripts."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at something; it changes nothing, and what it raises is told as unseen."""

    check: str
    run: Callable[[], Iterable[Finding]]


def duration(seconds: float) -> str:
    """Return *seconds* for people, as 3 h or 0.2 s."""
    for size_, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size_:
            return f"{seconds / size_:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Return a number of bytes for people, as 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its noun, as 1 event or 12,000 events."""
    return f"{number:,} {one if number == 1 else many}"
