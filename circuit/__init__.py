"""Circuit breakers: one per dependency, shared by every handler that names it."""

from holdfast.circuit.breaker import Breaker
from holdfast.circuit.events import Changed, Failed, Refused
from holdfast.circuit.layer import Circuit, circuit
from holdfast.circuit.metrics import CircuitMetrics
from holdfast.circuit.policy import CircuitPolicy
from holdfast.circuit.registry import BREAKERS, Breakers
from holdfast.circuit.sharing import MemorySharedState, SharedState, Sharing, Word
from holdfast.circuit.state import Closed, HalfOpen, Open, State
from holdfast.circuit.window import LastCalls, LastSeconds
from holdfast.errors import CircuitOpen

__all__ = [
    "BREAKERS",
    "Breaker",
    "Breakers",
    "Changed",
    "Circuit",
    "CircuitMetrics",
    "CircuitOpen",
    "CircuitPolicy",
    "Closed",
    "Failed",
    "HalfOpen",
    "LastCalls",
    "LastSeconds",
    "MemorySharedState",
    "Open",
    "Refused",
    "SharedState",
    "Sharing",
    "State",
    "Word",
    "circuit",
]
