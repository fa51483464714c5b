"""Gates: an open circuit lets no message of the handlers that name it run, and blames none."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from holdfast.circuit import Closed, HalfOpen, Open
from holdfast.errors import CircuitOpen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.circuit import Breaker
    from holdfast.clock import Clock
    from holdfast.consumer.route import Route
    from holdfast.consumer.work import Work


class Gates:
    """Asks the breakers of a handler whether one more message may be tried now.

    While a circuit is closed everybody passes. Open: nobody. Half-open: as many at a time
    as there are permits left.
    """

    def __init__(self, routes: Iterable[Route], clock: Clock) -> None:
        self._clock = clock
        self._routes = list(routes)
        self._inside: set[Work] = set()
        self._counts: Counter[Breaker] = Counter()
        self._lock = threading.Lock()

    def listen(self, wake: Callable[[], None]) -> list[Callable[[], None]]:
        """Call *wake* whenever a circuit changes; return what ends that."""
        breakers = {breaker for route in self._routes for breaker in route.breakers}
        return [breaker.listen(lambda _event: wake()) for breaker in breakers]

    def enter(self, work: Work) -> bool:
        """Let *work* in if every circuit of its handler has room."""
        breakers = work.route.breakers
        if not breakers:
            return True
        with self._lock:
            if not all(self._has_room(breaker) for breaker in breakers):
                return False
            self._inside.add(work)
            self._counts.update(breakers)
            return True

    def left(self, work: Work) -> None:
        """Note that *work* does not run any more."""
        with self._lock:
            if work in self._inside:
                self._inside.remove(work)
                self._counts.subtract(work.route.breakers)

    def has_room(self, work: Work) -> bool:
        """Whether *work* would be let in now."""
        with self._lock:
            return all(self._has_room(breaker) for breaker in work.route.breakers)

    def shut(self, in_hand: Callable[[], Iterable[Work]]) -> set[Route]:
        """Return the handlers whose intake is to be paused; *in_hand* is asked only if need be.

        A circuit that may be tried needs messages to try it with: the intake of its topics
        goes on until as many are in hand as there are permits left.
        """
        ailing = {
            breaker
            for route in self._routes
            for breaker in route.breakers
            if not isinstance(breaker.state, Closed)
        }
        if not ailing:
            return set()
        with self._lock:
            room = {breaker: self._permits(breaker) for breaker in ailing}
        for work in in_hand():
            for breaker in work.route.breakers:
                if breaker in room:
                    room[breaker] -= 1
        return {
            route for route in self._routes if any(room.get(one, 1) <= 0 for one in route.breakers)
        }

    def opens_in(self) -> float | None:
        """Return the seconds until an open circuit may be tried again; None: no moment known."""
        now = self._clock.monotonic()
        moments = [
            state.until - now
            for route in self._routes
            for breaker in route.breakers
            if isinstance(state := breaker.state, Open) and state.until is not None
        ]
        return min(moments, default=None)

    def _has_room(self, breaker: Breaker) -> bool:
        if isinstance(breaker.state, Closed):
            return True
        return self._counts[breaker] < self._permits(breaker)

    def _permits(self, breaker: Breaker) -> int:
        """Return how many messages may try a circuit that is not closed."""
        match breaker.state:
            case Open(until=until) if until is None or self._clock.monotonic() < until:
                return 0
            case HalfOpen(probes=probes):
                return breaker.policy.permits - probes.count(self._clock.monotonic()).calls
        return breaker.policy.permits


def note_outcome(breaker: Breaker | None, *, dead: bool) -> None:
    """Tell the kill switch of a topic what became of one of its messages."""
    if breaker is None:
        return
    try:
        permit = breaker.admit()
    except CircuitOpen:
        return  # a straggler
    if dead:
        breaker.failed(permit)
    else:
        breaker.succeeded(permit)
