"""An engine that is watched: how long steps take, and when it last moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.engine import RelayEngine, Step


class MeasuredEngine:
    """Passes everything on to *engine*, and notes when each step begins and ends."""

    def __init__(
        self,
        engine: RelayEngine,
        *,
        observe: Callable[[float], None] = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = engine.name
        self.pulse = clock.monotonic()
        """When a step last began or ended."""
        self._engine = engine
        self._observe = observe
        self._clock = clock

    def step(self) -> Step:
        """Do one step of the engine; a failed one is timed as well."""
        self.pulse = began = self._clock.monotonic()
        try:
            return self._engine.step()
        finally:
            self.pulse = self._clock.monotonic()
            self._observe(self.pulse - began)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
