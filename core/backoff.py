"""How long to wait after a failure: the policy decides, the clock waits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from holdfast.errors import ConfigurationError


class Jitter(Enum):
    """How a delay is spread, so that many clients do not come back at once."""

    NONE = "none"
    FULL = "full"
    EQUAL = "equal"
    DECORRELATED = "decorrelated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow by *factor* from *first* to *ceiling*, for at most *attempts* attempts.

    Full jitter draws from nothing up to the delay, equal jitter from its upper half.
    Decorrelated jitter draws from *first* up to the previous delay times 1 + *factor*, so
    that clients which failed together drift apart. No delay exceeds the ceiling.
    """

    first: float = 0.1
    ceiling: float = 30.0
    factor: float = 2.0
    attempts: int | None = None
    jitter: Jitter = Jitter.FULL
    randomness: random.Random = field(
        default_factory=random.SystemRandom, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("first", "ceiling", "factor", "attempts"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and not (value is None and name == "attempts"):
                raise ConfigurationError(f"Backoff({name}={value!r}): use a number")
        if not 0 < self.first <= self.ceiling < math.inf:
            raise ConfigurationError(
                f"Backoff(first={self.first}, ceiling={self.ceiling}): "
                "use 0 < first <= ceiling, and finite seconds"
            )
        if not 1 <= self.factor < math.inf:
            raise ConfigurationError(f"Backoff(factor={self.factor}): use 1 or more, and finite")
        if self.attempts is not None and self.attempts < 1:
            raise ConfigurationError(f"Backoff(attempts={self.attempts}): use 1 or more, or None")

    def delay(self, attempt: int, previous: float | None = None) -> float | None:
        """Return the seconds to wait after failed *attempt* (from 1); None means give up.

        *previous* is what this returned last time; only decorrelated jitter asks for it,
        and without it takes the longest delay that it could have been.
        """
        if self.attempts is not None and attempt >= self.attempts:
            return None
        match self.jitter:
            case Jitter.NONE:
                return self.longest(attempt)
            case Jitter.FULL:
                return self.randomness.uniform(0, self.longest(attempt))
            case Jitter.EQUAL:
                whole = self.longest(attempt)
                return self.randomness.uniform(whole / 2, whole)
            case Jitter.DECORRELATED:
                spread = self._spread(attempt, previous)
                return min(spread, self.randomness.uniform(self.first, spread))
        assert_never(self.jitter)

    def longest(self, attempt: int) -> float:
        """Return the delay after *attempt* before jitter; no attempt count overflows."""
        if self.factor == 1 or attempt <= 1:
            return self.first
        try:
            return min(self.ceiling, self.first * self.factor ** (attempt - 1))
        except OverflowError:
            return self.ceiling

    def _spread(self, attempt: int, previous: float | None) -> float:
        before = self.longest(attempt - 1) if previous is None else previous
        return min(self.ceiling, max(self.first, before) * (1 + self.factor))
