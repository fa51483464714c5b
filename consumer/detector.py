"""The outage detector: many messages that fail alike at once mean that something is down."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, ClassVar

from holdfast.circuit import Breaker, CircuitPolicy, Closed
from holdfast.classification import declared, recognise
from holdfast.consumer.transaction import DatabaseDown
from holdfast.consumer.work import current_work
from holdfast.deadline import current_deadline
from holdfast.errors import AttemptTimeout, CircuitOpen, Remedy
from holdfast.layer import Call, Layer, Stage
from holdfast.transactions import is_deadlock

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.clock import Clock
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.witness import Identity, Witness

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
        self, topic: str, settings: Settings, witness: Witness, clock: Clock, *,
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
        if call.message is not None:
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
            self._failing[who] = now
            recent = {one: at for one, at in self._failing.items() if now - at < _TOGETHER}
            spreads = self._after is not None and len(recent) >= self._after
            self._failing = {} if spreads else recent
        if spreads:
            work = current_work.get()
            text = type(error).__name__ if work is None else work.told(error)
            log.error("%d messages in a row failed alike, which is an outage: the intake pauses "
                      "and nobody is blamed: %s", self._after, text)  # fmt: skip
            self._open(f"messages in a row failed with {type(error).__name__}", None)

    def _open(self, cause: str, seconds: float | None) -> None:
        self.cause = cause
        self.breaker.trip(self.breaker.policy.open_seconds if seconds is None else seconds)
