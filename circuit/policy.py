"""When a circuit opens, for how long, and how it is tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from holdfast.circuit.window import LastCalls, LastSeconds, Window
from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitPolicy:
    """Opens when, of at least *minimum_calls* in the *window*, too many failed or were slow.

    After *open_seconds* it is half-open and lets *permits* calls through; when they have
    reported, it closes or opens again. A probe that has not reported after *probe_seconds*
    counts as failed. Slow calls count only if *slow_seconds* is given.
    """

    failure_rate: float = 0.5
    minimum_calls: int = 10
    window: Window = field(default_factory=LastCalls)
    slow_seconds: float | None = None
    slow_rate: float = 1.0
    open_seconds: float = 30.0
    permits: int = 3
    probe_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("failure_rate", "slow_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigurationError(
                    f"CircuitPolicy({name}={getattr(self, name)}): use a share above 0, at most 1"
                )
        for name in ("minimum_calls", "permits"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"CircuitPolicy({name}={getattr(self, name)}): use 1 or more"
                )
        for name in ("open_seconds", "probe_seconds", "slow_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigurationError(f"CircuitPolicy({name}={seconds}): use seconds above 0")
        if isinstance(self.window, LastSeconds) and not 0 < self.window.seconds < math.inf:
            raise ConfigurationError(f"CircuitPolicy(window={self.window}): use seconds above 0")
        if isinstance(self.window, LastCalls) and self.window.size < self.minimum_calls:
            raise ConfigurationError(
                f"CircuitPolicy(minimum_calls={self.minimum_calls}, window=LastCalls("
                f"{self.window.size})): the window never holds that many calls, so the circuit "
                "would never open"
            )

    def trips(self, window: Window, now: float) -> bool:
        """Whether a closed circuit with this *window* opens."""
        counts = window.count(now)
        return counts.calls >= self.minimum_calls and self.is_bad(
            counts.failed, counts.slow, counts.calls
        )

    def is_bad(self, failed: int, slow: int, calls: int) -> bool:
        """Whether so many failures or slow calls out of *calls* are too many."""
        return failed / calls >= self.failure_rate or (
            self.slow_seconds is not None and slow / calls >= self.slow_rate
        )
