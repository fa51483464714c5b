"""Prometheus metrics of breakers, read when they are scraped; every series starts at 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry

from holdfast.circuit.events import CallFailed, CallRefused, Event, StateChanged
from holdfast.circuit.state import Closed, HalfOpen, Open
from holdfast.metrics import Across, Instruments, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.circuit.breaker import Breaker

_STATES: dict[str, type[Any]] = {"closed": Closed, "open": Open, "half-open": HalfOpen}

STATE = gauge(
    "holdfast_circuit_state", "1 for the state in which the circuit is", "circuit", "state",
    across=Across.MAX,
)  # fmt: skip
CHANGES = counter("holdfast_circuit_changes", "Moves into a state", "circuit", "state")
REFUSED = counter("holdfast_circuit_refused", "Calls that were not let through", "circuit")
FAILED = counter(
    "holdfast_circuit_failed", "Calls that counted against the dependency", "circuit", "reason"
)


class CircuitMetrics:
    """Exports what breakers do; `BREAKERS.watch(CircuitMetrics().add)` exports them all."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        made = Instruments(registry)
        self._state = made.gauge(STATE)
        self._changes = made.counter(CHANGES)
        self._refused = made.counter(REFUSED)
        self._failed = made.counter(FAILED)

    def add(self, breaker: Breaker) -> None:
        """Export *breaker* from now on."""
        for word, kind in _STATES.items():
            self._state.labels(breaker.name, word).set_function(_is_in(breaker, kind))
            self._changes.labels(breaker.name, word)
        self._refused.labels(breaker.name)
        for reason in ("error", "slow"):
            self._failed.labels(breaker.name, reason)
        breaker.listen(self._count)

    def _count(self, event: Event) -> None:
        match event:
            case StateChanged():
                (word,) = (w for w, kind in _STATES.items() if isinstance(event.after, kind))
                self._changes.labels(event.name, word).inc()
            case CallRefused():
                self._refused.labels(event.name).inc()
            case CallFailed():
                reason = "slow" if event.error is None and event.slow else "error"
                self._failed.labels(event.name, reason).inc()


def _is_in(breaker: Breaker, kind: type[Any]) -> Callable[[], float]:
    return lambda: float(isinstance(breaker.state, kind))
