"""What a program that runs sagas tells: its gauges, and whether it is alive and ready."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.monitoring import HealthChecks
from holdfast.health import ProbeResult
from holdfast.metrics import Across, Instruments, gauge
from holdfast.sagas.operations import SagaOperations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric
    from sqlalchemy.engine import Engine

    from holdfast.consumer import Consumer
    from holdfast.sagas.engine import Sagas

log = logging.getLogger("holdfast.sagas")

_KEPT_SECONDS = 10.0
ACTIVE = gauge(
    "holdfast_sagas", "Sagas that have not ended", "saga", "status", across=Across.MAX
)  # fmt: skip
OVERDUE = gauge(
    "holdfast_saga_overdue", "Sagas past their deadline that have not ended", "saga",
    across=Across.MAX,
)  # fmt: skip
TIMER_LAG = gauge(
    "holdfast_saga_timer_lag_seconds", "How late the timer is that is due for longest",
    across=Across.MAX,
)  # fmt: skip


class SagaCollector(Collector):
    """Shows how many sagas run, are parked or overdue, and how late timers are.

    Every worker shows the same, as the tables say. They are asked every ten seconds at most.
    While the database is away the series are missing, as they should be: what was true a
    while ago is no answer.
    """

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._operations = SagaOperations(engine, clock=clock)
        self._clock = clock
        self._until = 0.0
        self._kept: list[Metric] = []
        Instruments(REGISTRY).tells(self, ACTIVE, OVERDUE, TIMER_LAG)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        if self._clock.monotonic() >= self._until:
            try:
                self._kept = self._asked()
            except DBAPIError as error:
                log.warning("the gauges of sagas are missing: %s", type(error).__name__)
                self._kept = []
            self._until = self._clock.monotonic() + _KEPT_SECONDS
        yield from self._kept

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not ask the database."""
        return iter(())

    def _asked(self) -> list[Metric]:
        found = self._operations.backlog()
        return [
            ACTIVE.family(by=found.active.items()),
            OVERDUE.family(by=(((saga,), n) for saga, n in found.overdue_by_saga.items())),
            TIMER_LAG.family(found.timer_lag_seconds),
        ]


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
