"""Prometheus metrics of breakers, read when they are scraped; every series starts at 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from holdfast.circuit.events import Changed, Event, Failed, Refused
from holdfast.circuit.state import Closed, HalfOpen, Open

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.circuit.breaker import Breaker

_STATES: dict[str, type[Any]] = {"closed": Closed, "open": Open, "half-open": HalfOpen}


class CircuitMetrics:
    """Exports what breakers do; `BREAKERS.watch(CircuitMetrics().add)` exports them all."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._state = Gauge(
            "holdfast_circuit_state",
            "1 for the state in which the circuit is",
            ["circuit", "state"],
            registry=registry,
        )
        self._changes = Counter(
            "holdfast_circuit_changes",
            "Moves into a state",
            ["circuit", "state"],
            registry=registry,
        )
        self._refused = Counter(
            "holdfast_circuit_refused",
            "Calls that were not let through",
            ["circuit"],
            registry=registry,
        )
        self._failed = Counter(
            "holdfast_circuit_failed",
            "Calls that counted against the dependency",
            ["circuit", "reason"],
            registry=registry,
        )

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
            case Changed():
                (word,) = (w for w, kind in _STATES.items() if isinstance(event.after, kind))
                self._changes.labels(event.name, word).inc()
            case Refused():
                self._refused.labels(event.name).inc()
            case Failed():
                reason = "slow" if event.error is None and event.slow else "error"
                self._failed.labels(event.name, reason).inc()


def _is_in(breaker: Breaker, kind: type[Any]) -> Callable[[], float]:
    return lambda: float(isinstance(breaker.state, kind))
