"""An outage is not poison: what a dependency did is not held against a message."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, ClassVar

from holdfast.call import Call, Stage
from holdfast.circuit import Breaker, CircuitPolicy, Closed
from holdfast.classification import declared, recognise
from holdfast.clock import current_deadline
from holdfast.consumer.scheduling.work import current_work
from holdfast.db.errors import DatabaseDown, is_deadlock
from holdfast.errors import AttemptTimeout, CircuitOpen, DependencyDown, Remedy
from holdfast.layer import Layer

if TYPE_CHECKING:
    from holdfast.clock import Clock

    Identity = tuple[str, str]
    from collections.abc import Collection, Iterable, Sequence

    from holdfast.circuit import Circuit
    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import Settings

PROOF = 2
"""So many failures of a message, each after another one has passed since the failure before, and
the fault is its own. Once is no proof: an outage begins in the midst of calls that pass."""

_REMEMBERED = 10_000
_FRESH = 3600.0
"""Seconds after which a failure says nothing about the next one."""


class OutageWitness:
    """Remembers which message passed each circuit last, and which ones fail; any thread may ask.

    Shared by the handlers of a consumer. Messages are known by handler and id, so that one which
    comes again, parked or in a loop of the user's own, goes on where it stood. Bounded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._passed: dict[Breaker, tuple[Identity, float]] = {}
        self.failing: dict[Identity, tuple[float, int]] = {}
        """When each failed last, and how often others had passed since the failure before.

        What passes while it is empty proves nothing, and need not be noted."""

    def passed(self, breaker: Breaker, who: Identity) -> None:
        """Note that the dependency served a message."""
        self._passed[breaker] = who, self._clock.monotonic()
        self.failing.pop(who, None)

    def failed(self, breaker: Breaker, who: Identity) -> None:
        """Note that it failed a message."""
        last, overtaken = self.failing.get(who, (0.0, 0))
        if self._clock.monotonic() - last > _FRESH:
            last, overtaken = 0.0, 0
        other, when = self._passed.get(breaker, (who, 0.0))
        if other != who and when > last > 0.0:
            overtaken += 1
        self.failing.pop(who, None)  # it is the newest now
        while len(self.failing) >= _REMEMBERED:
            self.failing.pop(next(iter(self.failing)), None)
        self.failing[who] = self._clock.monotonic(), overtaken

    def is_own_fault(self, who: Identity) -> bool:
        """Whether *who* fails although others pass: no outage excuses it."""
        return self.failing.get(who, (0.0, 0))[1] >= PROOF

    def forget(self, who: Identity) -> None:
        """Begin anew with *who*: its way has ended, and it may be sent again one day."""
        self.failing.pop(who, None)


log = logging.getLogger("holdfast.consumer")
_TOGETHER = 60.0
"""Seconds within which failures of different messages belong together."""


class OutageDetector(Layer):
    """The circuit that every handler has, also one that names no dependency.

    It opens when several messages have failed alike, each for want of a dependency, and none
    has passed since; or when a circuit inside the handler is open, for as long as that says. Then
    the topic pauses, and two messages at a time try. A message that fails again and again while
    others pass does not count: its fault is its own.
    """

    stage: ClassVar[Stage] = Stage.BREAKER
    label: ClassVar[str] = "outage detector"

    def __init__(
        self, topic: str, settings: Settings, witness: OutageWitness, clock: Clock, *,
        named: Collection[str],
    ) -> None:  # fmt: skip
        # Its own window never trips it: what counts is how many messages fail, not how often.
        # Two try: one that has not tried yet and one that has, whichever of them is to blame.
        policy = CircuitPolicy(failure_rate=1.0, open_seconds=settings.outage_seconds, permits=2)
        self.breaker = Breaker(f"what {topic} needs", policy, clock=clock)
        self._after = None if named else settings.outage_after
        self._named = frozenset(named)
        """The circuits of the handler itself, which have gates of their own."""
        self._witness = witness
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: dict[Identity, float] = {}
        self.cause: str | None = None
        """Why it opened last."""

    def describe(self) -> str:
        """Say when it opens."""
        return "circuits inside" if self._after is None else f"{self._after} messages fail alike"

    @property
    def is_open(self) -> bool:
        """Whether something is taken to be down."""
        return not isinstance(self.breaker.state, Closed)

    def excuses(self, who: Identity, error: BaseException) -> bool:
        """Whether *error* of *who* may turn out to be an outage."""
        return self.blames(error) and not self._witness.is_own_fault(who)

    def blames(self, error: BaseException) -> bool:
        """Whether *error* speaks of a dependency that is away, and so is watched here.

        Connections and time-outs do, and what says so itself (`DependencyDown`). A `Transient`
        of the handler's own speaks of the message, a deadlock of its rivals.
        """
        if self._after is None or isinstance(error, CircuitOpen | DatabaseDown):
            return False
        if isinstance(error, asyncio.CancelledError):
            deadline = current_deadline()
            return deadline is not None and deadline.is_over()
        said = declared(error)
        if said is not None:
            return said is Remedy.PAUSE or isinstance(error, AttemptTimeout)
        return recognise(error) is Remedy.RETRY and not is_deadlock(error)

    def enter(self, call: Call) -> None:
        """Ask for a permit."""
        standing = self.breaker.standing
        call.notes[self] = self.breaker.admit() if standing is None else standing

    def leave(self, call: Call) -> None:
        """Note that a message passed; a duplicate asked nobody."""
        breaker, permit = self.breaker, call.notes[self]
        if call.duplicate:
            breaker.give_back(permit)
            return
        if self._witness.failing and call.message is not None:
            self._witness.passed(breaker, (call.consumer, call.message.identity))
        if self._failing:
            with self._lock:
                self._failing.clear()
        if permit is not breaker.standing:
            breaker.succeeded(permit)

    def fail(self, call: Call, error: BaseException) -> None:
        """Open where that was one failure too many."""
        if isinstance(error, CircuitOpen) and error.name not in self._named:
            self._open(f"the circuit of {error.name!r} is open", error.retry_after)
        elif not self.blames(error) or self._is_own_fault(call):
            self.breaker.give_back(call.notes[self])
        elif self.is_open:
            self.breaker.failed(call.notes[self], error)
        elif call.message is not None:
            self._count((call.consumer, call.message.identity), error)

    def _is_own_fault(self, call: Call) -> bool:
        """Note that a dependency failed the message; return whether others pass meanwhile."""
        if call.message is None:
            return False
        who = call.consumer, call.message.identity
        self._witness.failed(self.breaker, who)
        return self._witness.is_own_fault(who)

    def _count(self, who: Identity, error: BaseException) -> None:
        now = self._clock.monotonic()
        with self._lock:
            if self.is_open:  # another thread was first
                return
            self._failing[who] = now
            recent = {one: at for one, at in self._failing.items() if now - at < _TOGETHER}
            spreads = self._after is not None and len(recent) >= self._after
            self._failing = {} if spreads else recent
            if spreads:  # within the lock: whoever fails from now on is excused
                self._open(f"messages in a row failed with {type(error).__name__}", None)
        if spreads:
            work = current_work.get()
            text = type(error).__name__ if work is None else work.told(error)
            log.error("%d messages in a row failed alike, which is an outage: the intake pauses "
                      "and nobody is blamed: %s", self._after, text)  # fmt: skip

    def _open(self, cause: str, seconds: float | None) -> None:
        self.cause = cause
        self.breaker.trip(self.breaker.policy.open_seconds if seconds is None else seconds)


class PossiblyDown(DependencyDown):
    """A dependency fails a message, and has not served others in between."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} fails it, and perhaps all others: it waits, without blame, until others are "
            "served"
        )
        self.name = name


class OutageGuard(Layer):
    """Turns the last failure of a message into "dependency down" where that is what it was.

    A message whose retries are spent on a dependency is not dead while nobody else is served
    either: it waits, however few calls the circuit has counted so far. One that fails again and
    again while others pass has no such excuse.
    """

    stage: ClassVar[Stage] = Stage.DURABLE_RETRY
    label: ClassVar[str] = "outage guard"

    def __init__(
        self, circuits: Sequence[Circuit], detector: OutageDetector, witness: OutageWitness
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
        self.passed_all([(consumer, message_id)])

    def passed_all(self, identities: Iterable[Identity]) -> None:
        """Note that the dependencies of a handler served messages, of these *identities*."""
        if self._circuits:
            for one in identities:
                for circuit in self._circuits:
                    self._witness.passed(circuit.breaker, one)

    def leave(self, call: Call) -> None:
        """Note that the message passed; a duplicate asked nobody."""
        if self._witness.failing and call.message is not None and not call.duplicate:
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
            raise PossiblyDown(breaker.name) from error
