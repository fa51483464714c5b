"""Circuit breakers: one per dependency, shared by every handler that names it."""

from typing import TYPE_CHECKING

from holdfast.callable_module import make_callable
from holdfast.circuit.breaker import Breaker
from holdfast.circuit.events import CallFailed, CallRefused, StateChanged
from holdfast.circuit.layer import Circuit, circuit
from holdfast.circuit.policy import CircuitPolicy
from holdfast.circuit.registry import BREAKERS, Breakers
from holdfast.circuit.state import Closed, HalfOpen, Open, State
from holdfast.circuit.window import LastCalls, LastSeconds
from holdfast.errors import CircuitOpen
from holdfast.extras import lazily

if TYPE_CHECKING:
    from holdfast.circuit.metrics import CircuitMetrics
    from holdfast.circuit.sharing import MemorySharedState, SharedState, SharedVerdict, Sharing

__all__ = [
    "BREAKERS",
    "Breaker",
    "Breakers",
    "CallFailed",
    "CallRefused",
    "Circuit",
    "CircuitMetrics",
    "CircuitOpen",
    "CircuitPolicy",
    "Closed",
    "HalfOpen",
    "LastCalls",
    "LastSeconds",
    "MemorySharedState",
    "Open",
    "SharedState",
    "SharedVerdict",
    "Sharing",
    "State",
    "StateChanged",
    "circuit",
]

# Most breakers are neither shared nor exported.
__getattr__ = lazily(
    __name__,
    {
        "metrics": "CircuitMetrics",
        "sharing": "MemorySharedState SharedState SharedVerdict Sharing",
    },
)

make_callable(__name__)
