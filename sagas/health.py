"""Whether a program that runs sagas is alive and ready: its consumer, and its timers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.consumer.monitoring import HealthChecks
from holdfast.health import ProbeResult

if TYPE_CHECKING:
    from holdfast.consumer import Consumer
    from holdfast.sagas.engine import Sagas


class SagaHealth:
    """Judges `Sagas.run` by its consumer and by the thread of its timers.

    A dead thread is a reason to restart the program, an outage is not: it stays alive then, and is
    not ready. A local step that takes long is no reason either, for its lease is renewed.
    """

    def __init__(self, sagas: Sagas, consumer: Consumer, *, stall_seconds: float = 120.0) -> None:
        self._sagas = sagas
        self._checks = HealthChecks(consumer, stall_seconds=stall_seconds)

    def alive(self) -> ProbeResult:
        """Whether replies are polled for, and timers are looked at."""
        worker = self._sagas.running
        if worker is not None and worker.has_died:
            return ProbeResult(False, "the thread of the timers has died")
        return self._checks.alive()

    def ready(self) -> ProbeResult:
        """Whether replies are taken and timers are worked off."""
        worker = self._sagas.running
        found = self._checks.ready()
        if worker is not None and worker.database_down is not None:
            why = f"timers wait for the database: {worker.database_down}"
            return ProbeResult(False, why if found.good else f"{found.why}; {why}")
        return found
