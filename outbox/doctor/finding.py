"""A finding: how bad, what was seen, and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How bad it is; the worst one is the exit code of `holdfast doctor`."""

    OK = 0
    WARNING = 1
    CRITICAL = 2

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From when on something is worth a word; pairs are warning and critical."""

    oldest_seconds: tuple[float, float] = (60.0, 600.0)
    backlog: tuple[float, float] = (100_000, 10_000_000)
    overdue_seconds: tuple[float, float] = (30.0, 600.0)
    transaction_seconds: tuple[float, float] = (60.0, 3600.0)
    retained_bytes: tuple[float, float] = (256e6, 4e9)
    runway_minutes: tuple[float, float] = (240.0, 30.0)
    """Counted downwards: less is worse."""
    xmin_age: tuple[float, float] = (1_000_000, 100_000_000)
    """Transactions for which a slot keeps vacuum from clearing what they deleted."""
    dead_rows: tuple[float, float] = (100_000, 5_000_000)
    skew_seconds: tuple[float, float] = (2.0, 60.0)
    rate_seconds: float = 1.0
    """How long the growth of the log is watched."""


def duration(seconds: float) -> str:
    """Return *seconds* for people, as 3 h or 0.2 s."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Return a number of bytes for people, as 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
