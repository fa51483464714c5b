"""An outage is not poison: what a dependency did is not held against a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from holdfast.errors import CircuitOpen
from holdfast.layer import Call, Layer, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.circuit import Breaker, Circuit


class Outage(Layer):
    """Turns the last failure of a message into "dependency down" where that is what it was.

    A message whose retries are spent on a dependency that also fails nearly everybody else
    is not dead: it waits for the circuit, however few calls have been counted so far.
    """

    stage: ClassVar[Stage] = Stage.DURABLE_RETRY
    label: ClassVar[str] = "outage guard"

    def __init__(self, circuits: Sequence[Circuit]) -> None:
        self._circuits = tuple(circuits)

    def describe(self) -> str:
        """Say the dependencies."""
        return ", ".join(circuit.dependency for circuit in self._circuits)

    def blamed(self, error: BaseException) -> Breaker | None:
        """Return the breaker that *error* counts against, None if the message is to blame."""
        for circuit in self._circuits:
            if circuit.blames(error):
                return circuit.breaker
        return None

    def fail(self, call: Call, error: BaseException) -> None:
        """Raise `CircuitOpen` instead, so that nothing outside blames the message."""
        if isinstance(error, CircuitOpen):
            return
        breaker = self.blamed(error)
        if breaker is not None and breaker.is_failing():
            raise CircuitOpen(breaker.name, None) from error
