"""Durations as people write them: "30s", "90m", "36h", "14d", "2w"."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from holdfast.errors import ConfigurationError

Duration = str | int | float | timedelta

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def in_seconds(duration: Duration, *, of: str) -> float:
    """Return *duration* in seconds; *of* names what it is for in the error about nonsense."""
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        seconds = _read(duration)
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    else:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{of}={duration!r}: write a number above 0 with its unit, e.g. "
            '"30s", "90m", "36h", "14d" or "2w", or pass seconds or a timedelta'
        )
    return seconds


def written(text: str, *, of: str) -> float:
    """Return the seconds in *text*, as somebody typed it: 0 is a length, too."""
    seconds = _read(text)
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{of} {text!r}: write a number and its unit, e.g. 30s, 15m, 4h or 14d"
        )
    return seconds


def as_text(seconds: float) -> str:
    """Return *seconds* in the largest unit that divides them."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def _read(text: str) -> float:
    found = _WRITTEN.fullmatch(text)
    if found is None or found[2] not in _SECONDS:
        return math.nan
    return float(found[1]) * _SECONDS[found[2]]
