"""An outage is not poison: what a dependency did is not held against a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from holdfast.consumer.work import current_work
from holdfast.errors import CircuitOpen, DependencyDown
from holdfast.layer import Call, Layer, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.circuit import Breaker, Circuit
    from holdfast.consumer.detector import OutageDetector
    from holdfast.consumer.witness import Witness
    from holdfast.consumer.work import Work


class PerhapsDown(DependencyDown):
    """A dependency fails a message, and has not served others in between."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} fails it, and perhaps all others: it waits, without blame, until others are "
            "served"
        )
        self.name = name


class Outage(Layer):
    """Turns the last failure of a message into "dependency down" where that is what it was.

    A message whose retries are spent on a dependency is not dead while nobody else is served
    either: it waits, however few calls the circuit has counted so far. One that fails again and
    again while others pass has no such excuse.
    """

    stage: ClassVar[Stage] = Stage.DURABLE_RETRY
    label: ClassVar[str] = "outage guard"

    def __init__(
        self, circuits: Sequence[Circuit], detector: OutageDetector, witness: Witness
    ) -> None:
        self._circuits = tuple(circuits)
        self.detector = detector
        self._witness = witness

    def describe(self) -> str:
        """Say the dependencies."""
        return ", ".join(circuit.dependency for circuit in self._circuits)

    def is_on(self, work: Work, error: BaseException) -> bool:
        """Whether *error* is of an outage that is known by now: it is no use to try again."""
        return self.detector.is_open and self.detector.excuses(work.identity, error)

    def blamed(self, error: BaseException) -> Breaker | None:
        """Return the breaker that *error* counts against, None if the message is to blame."""
        for circuit in self._circuits:
            if circuit.blames(error):
                return circuit.breaker
        return None

    def excuses(self, work: Work, error: BaseException) -> bool:
        """Note that *error* failed *work*; return whether that may turn out to be an outage."""
        breaker = self.blamed(error)
        if breaker is None:
            return self.detector.excuses(work.identity, error)
        self._witness.failed(breaker, work.identity)
        return not self._witness.is_own_fault(work.identity)

    def passed(self, consumer: str, message_id: str) -> None:
        """Note that the dependencies of *consumer* served a message."""
        for circuit in self._circuits:
            self._witness.passed(circuit.breaker, (consumer, message_id))

    def leave(self, call: Call) -> None:
        """Note that the message passed; a duplicate asked nobody."""
        if call.message is not None and not call.duplicate:
            self.passed(call.consumer, call.message.identity)

    def fail(self, call: Call, error: BaseException) -> None:
        """Raise that the dependency is down instead, so that nothing outside blames the message.

        A circuit that has served many may take longer to open than one message has retries. So
        one with an error that passes waits, until others show whose fault it is. An error that
        nobody knows is no such excuse: it would wait for ever in a topic of one key.
        """
        if isinstance(error, CircuitOpen):
            return
        breaker, work = self.blamed(error), current_work.get()
        if breaker is None:
            if work is not None and self.is_on(work, error):
                raise CircuitOpen(self.detector.breaker.name, None) from error
            if work is not None and not isinstance(error, DependencyDown):
                self._witness.forget(work.identity)
            return
        if work is not None and not self.excuses(work, error):
            self._witness.forget(work.identity)
            return
        if breaker.is_failing():
            raise CircuitOpen(breaker.name, None) from error
        if work is not None and any(circuit.is_passing(error) for circuit in self._circuits):
            raise PerhapsDown(breaker.name) from error
