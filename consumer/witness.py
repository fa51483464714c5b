"""The witness: whether a dependency that fails one message serves the others meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.circuit import Breaker
    from holdfast.clock import Clock

    Identity = tuple[str, str]

PROOF = 2
"""So many failures of a message, each after another one has passed since the failure before, and
the fault is its own. Once is no proof: an outage begins in the midst of calls that pass."""

_REMEMBERED = 10_000
_FRESH = 3600.0
"""Seconds after which a failure says nothing about the next one."""


class Witness:
    """Remembers which message passed each circuit last, and which ones fail; any thread may ask.

    Shared by the handlers of a consumer. Messages are known by handler and id, so that one which
    comes again, parked or in a loop of the user's own, goes on where it stood. Bounded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._passed: dict[Breaker, tuple[Identity, float]] = {}
        self._failing: dict[Identity, tuple[float, int]] = {}

    def passed(self, breaker: Breaker, who: Identity) -> None:
        """Note that the dependency served a message."""
        self._passed[breaker] = who, self._clock.monotonic()
        if self._failing:
            self._failing.pop(who, None)

    def failed(self, breaker: Breaker, who: Identity) -> None:
        """Note that it failed a message."""
        last, overtaken = self._failing.pop(who, (0.0, 0))
        if self._clock.monotonic() - last > _FRESH:
            last, overtaken = 0.0, 0
        other, when = self._passed.get(breaker, (who, 0.0))
        if other != who and when > last > 0.0:
            overtaken += 1
        while len(self._failing) >= _REMEMBERED:
            self._failing.pop(next(iter(self._failing)), None)
        self._failing[who] = self._clock.monotonic(), overtaken

    def is_own_fault(self, who: Identity) -> bool:
        """Whether *who* fails although others pass: no outage excuses it."""
        return self._failing.get(who, (0.0, 0))[1] >= PROOF

    def forget(self, who: Identity) -> None:
        """Begin anew with *who*: its way has ended, and it may be sent again one day."""
        self._failing.pop(who, None)
