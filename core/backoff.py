"""How long to wait after a failure: the policy decides, the clock waits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum

from holdfast.errors import ConfigurationError


class Jitter(Enum):
    """How a delay is spread, so that many clients do not come back at once."""

    NONE = "none"
    FULL = "full"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow by *factor* from *first* to *ceiling*, for at most *attempts* attempts.

    Full jitter draws from nothing up to the delay, equal jitter from its upper half.
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
        if not 0 < self.first <= self.ceiling:
            raise ConfigurationError(
                f"Backoff(first={self.first}, ceiling={self.ceiling}): use 0 < first <= ceiling"
            )
        if self.factor < 1:
            raise ConfigurationError(f"Backoff(factor={self.factor}): use 1 or more")
        if self.attempts is not None and self.attempts < 1:
            raise ConfigurationError(f"Backoff(attempts={self.attempts}): use 1 or more, or None")

    def delay(self, attempt: int) -> float | None:
        """Return the seconds to wait after failed *attempt* (from 1); None means give up."""
        if self.attempts is not None and attempt >= self.attempts:
            return None
        whole = self.longest(attempt)
        match self.jitter:
            case Jitter.FULL:
                return self.randomness.uniform(0, whole)
            case Jitter.EQUAL:
                return self.randomness.uniform(whole / 2, whole)
            case Jitter.NONE:
                return whole

    def longest(self, attempt: int) -> float:
        """Return the delay after *attempt* before jitter; no attempt count overflows."""
        if self.factor == 1:
            return self.first
        steps = math.log(self.ceiling / self.first, self.factor)
        return self.ceiling if attempt - 1 >= steps else self.first * self.factor ** (attempt - 1)
