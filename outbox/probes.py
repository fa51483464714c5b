"""Is the relay alive, is it ready: decisions for an orchestrator's probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.outbox.measured_engine import MeasuredEngine
    from holdfast.outbox.relay import Health


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe answers."""

    good: bool
    why: str


class Probes:
    """Judges a relay by what it did last.

    An outage of broker or database is no reason to restart the relay, so it stays alive
    but not ready. A step that never ends is a reason.
    """

    def __init__(
        self,
        health: Health,
        engine: MeasuredEngine,
        *,
        stall_seconds: float = 120.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if stall_seconds <= 0:
            raise ConfigurationError(f"stall_seconds {stall_seconds}: use more than 0")
        self._health = health
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._clock = clock

    def alive(self) -> Verdict:
        """Whether the relay still steps, be it through an outage."""
        silent = self._clock.monotonic() - self._engine.pulse
        if silent > self._stall_seconds:
            return Verdict(False, f"no step began or ended for {silent:.0f} s")
        return Verdict(True, "stepping" if self._health.outage is None else "waiting")

    def ready(self) -> Verdict:
        """Whether the relay does its work, or stands by to take over."""
        health = self._health
        if health.outage is not None:
            return Verdict(False, f"outage: {health.outage}")
        if health.last_step == float("-inf"):
            return Verdict(False, "starting")
        if health.hindered is not None:
            return Verdict(False, f"hindered: {health.hindered}")
        if health.missing:
            return Verdict(False, f"events wait, no such topic: {', '.join(health.missing)}")
        return Verdict(True, "standby" if health.standby else "publishing")
