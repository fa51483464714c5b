"""The witness: whether a dependency that fails one message serves the others meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.circuit import Breaker
    from holdfast.clock import Clock
    from holdfast.consumer.work import Work

PROOF = 2
"""So many failures of a message, each after another one has passed since the failure before, and
the fault is its own. Once is no proof: an outage begins in the midst of calls that pass."""


class Witness:
    """Remembers which message passed each circuit last; shared by the handlers of a consumer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._passed: dict[Breaker, tuple[str, float]] = {}

    def passed(self, breaker: Breaker, message_id: str) -> None:
        """Note that the dependency served a message."""
        self._passed[breaker] = message_id, self._clock.monotonic()

    def failed(self, breaker: Breaker, work: Work) -> None:
        """Note that it failed *work*."""
        who, when = self._passed.get(breaker, ("", 0.0))
        if who and who != work.message.id and when > work.failed_at > 0.0:
            work.overtaken += 1
        work.failed_at = self._clock.monotonic()

    @staticmethod
    def is_own_fault(work: Work) -> bool:
        """Whether *work* fails although others pass: no outage excuses it."""
        return work.overtaken >= PROOF
