"""The breaker: the state machine behind a lock that is never held during a call."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from holdfast.circuit import state as states
from holdfast.circuit.events import CallFailed, CallRefused, Event, StateChanged
from holdfast.circuit.policy import CircuitPolicy
from holdfast.circuit.state import Closed, HalfOpen, Open, State
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import CircuitOpen

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Event], None]

log = logging.getLogger("holdfast.circuit")


class Permit(msgspec.Struct, frozen=True, gc=False):
    """The right to make one call; hand it back with the outcome."""

    generation: int
    started: float | None = None


class Breaker:
    """Guards one dependency; every thread and handler that calls it shares this object.

    `admit` before the call, then exactly one of `succeeded`, `failed` or `give_back`.
    While the circuit is closed and all is well, no lock is taken at all.
    """

    def __init__(
        self, name: str, policy: CircuitPolicy | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.name = name
        self.policy = CircuitPolicy() if policy is None else policy
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._state: State = states.closed(0, self.policy)
        self.standing: Permit | None = None
        """The permit that serves everybody while the circuit is closed."""
        self.is_steady = False
        """Whether one more quick success would change nothing, so that none need be noted."""
        self._settle_in()

    @property
    def state(self) -> State:
        """The state as it stands; an open circuit stays `Open` until a call asks."""
        return self._state

    def is_failing(self) -> bool:
        """Whether the dependency fails too many calls, even if too few to open the circuit."""
        state = self._state
        if not isinstance(state, Closed):
            return True
        counts = state.window.count(self._clock.monotonic())
        return bool(counts.calls) and self.policy.is_bad(counts.failed, counts.slow, counts.calls)

    def admit(self) -> Permit:
        """Return the permit for one call, or raise `CircuitOpen`: then no call is made."""
        permit = self.standing
        return self._ask() if permit is None else permit

    def succeeded(self, permit: Permit) -> None:
        """Note that the call went well, or at least answered."""
        if self.is_steady and permit is self.standing:
            return
        self._note(permit, failed=False, error=None)

    def failed(self, permit: Permit, error: BaseException | None = None) -> None:
        """Note that the dependency failed the call."""
        self._note(permit, failed=True, error=error)

    def give_back(self, permit: Permit) -> None:
        """Return a permit that told nothing about the dependency, e.g. after a duplicate."""
        if permit is self.standing:
            return
        with self._lock:
            self._state = states.give_back(self._state, permit.generation)

    def open(self, seconds: float | None = None) -> None:
        """Open by hand, for *seconds* or until `close`, `half_open` or `reset`."""
        self._move(lambda state, now: states.opened(state, seconds, now))

    def trip(self, seconds: float) -> None:
        """Open for *seconds* on what somebody else has found out, and be probed after that."""
        self._move(lambda state, now: states.opened(state, seconds, now), told=False)

    def half_open(self) -> None:
        """Let the next calls probe the dependency, by hand."""
        self._move(lambda state, now: states.half_open(state, self.policy, now))

    def close(self) -> None:
        """Close by hand, with an empty window."""
        self._move(lambda state, now: states.closed(state.generation + 1, self.policy))

    reset = close

    def adopt(self, policy: CircuitPolicy) -> None:
        """Go on under another *policy*, closed and with an empty window."""
        self.policy = policy
        self.close()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell *listener* every event from now on; return what ends it.

        Listeners run in the thread that made the call, outside the lock, and quickly.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end

    def _ask(self) -> Permit:
        now = self._clock.monotonic()
        state = self._state
        if isinstance(state, Closed):
            return Permit(state.generation, now)
        with self._lock:
            before = self._state
            after, admitted = states.admit(before, self.policy, now)
            self._become(after)
        self._tell_change(before, after)
        if admitted:
            return Permit(after.generation, now)
        self._tell(CallRefused(name=self.name))
        raise self._refusal(after, now)

    def _refusal(self, state: State, now: float) -> CircuitOpen:
        if not isinstance(state, Open) or state.until is None:
            return CircuitOpen(self.name, None)
        left = state.until - now
        return CircuitOpen(self.name, self._clock.now() + timedelta(seconds=left), retry_after=left)

    def _note(self, permit: Permit, *, failed: bool, error: BaseException | None) -> None:
        now = self._clock.monotonic()
        limit, started = self.policy.slow_seconds, permit.started
        slow = limit is not None and started is not None and now - started >= limit
        if self.is_steady and not failed and not slow:
            return
        with self._lock:
            before = self._state
            after = states.record(
                before, self.policy, permit.generation, failed=failed, slow=slow, now=now
            )
            self._become(after)
        if (failed or slow) and self._listeners:
            self._tell(CallFailed(name=self.name, error=error, slow=slow))
        self._tell_change(before, after)

    def _move(self, following: Callable[[State, float], State], *, told: bool = True) -> None:
        now = self._clock.monotonic()
        with self._lock:
            before = self._state
            after = following(before, now)
            self._become(after)
        self._tell_change(before, after, told=told)

    def _become(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._settle_in()

    def _settle_in(self) -> None:
        """Prepare the paths without a lock: the shared permit, and the window that stands."""
        state = self._state
        self.is_steady = isinstance(state, Closed) and state.window.is_steady()
        if not isinstance(state, Closed) or self.policy.slow_seconds is not None:
            self.standing = None
        elif self.standing is None or self.standing.generation != state.generation:
            self.standing = Permit(state.generation)

    def _tell_change(self, before: State, after: State, *, told: bool = False) -> None:
        if type(before) is type(after):
            return
        # A probe in vain is no news: an outage is told when it begins and when it ends.
        probing = isinstance(after, HalfOpen) or isinstance(before, HalfOpen)
        rest = logging.DEBUG if probing and not told else logging.WARNING
        log.log(
            logging.INFO if isinstance(after, Closed) else rest,
            "the circuit of %r is %s%s",
            self.name,
            _word(after),
            ", as told" if told else "",
        )
        self._tell(
            StateChanged(
                name=self.name, before=before, after=after, at=self._clock.now(), told=told
            )
        )

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                # A listener's fault must not become a failed call.
                log.exception("a listener of the circuit of %r failed", self.name)


def _word(state: State) -> str:
    match state:
        case Closed():
            return "closed"
        case Open():
            return "open"
        case HalfOpen():
            return "half-open"
