"""How fast a plan may send: a token bucket on an injected clock."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError

_WRITTEN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(?:/(s|m|h))?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages per second; None is as fast as the broker takes them."""

    per_second: float | None = None

    def __post_init__(self) -> None:
        if self.per_second is not None and self.per_second <= 0:
            raise ConfigurationError(f"a rate of {self.per_second:g}/s sends nothing: use above 0")

    @classmethod
    def parse(cls, text: str | None) -> Rate:
        """Return the rate written as `500/s`, `30/m` or `1000/h`; None has no limit."""
        if text is None:
            return cls()
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise ConfigurationError(
                f"rate {text!r}: write a number per second, e.g. 500/s or 30/m"
            )
        return cls(float(found[1]) / _SECONDS[found[2] or "s"])

    def __str__(self) -> str:
        return "no limit" if self.per_second is None else f"{self.per_second:g}/s"

    def seconds_for(self, count: int) -> float | None:
        """Return how long *count* messages take; None when only the broker decides."""
        return None if self.per_second is None else count / self.per_second


class Bucket:
    """Lets through what the rate allows; what was not used for a second is forfeited."""

    def __init__(self, rate: Rate, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.rate = rate
        self._rate = rate.per_second
        self._clock = clock
        self._most = 0.0 if self._rate is None else max(1.0, self._rate)
        self._tokens = min(1.0, self._most)
        self._at = clock.monotonic()

    def grant(self, wanted: int) -> tuple[int, float]:
        """Return how many may go now, at most *wanted*; and if none, the seconds to wait."""
        if self._rate is None:
            return wanted, 0.0
        now = self._clock.monotonic()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # Not one by one: a tenth of a second's worth at least, or all that is wanted.
        least = min(float(wanted), max(1.0, self._rate / 10))
        if self._tokens < least:
            return 0, (least - self._tokens) / self._rate
        granted = min(wanted, int(self._tokens))
        self._tokens -= granted
        return granted, 0.0
