"""The circuit gate: who tries a circuit that is not closed; the permits are counted elsewhere."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from holdfast.circuit import Closed, Open
from holdfast.consumer.scheduling.eligibility import coming_generation, permits, takes_permit
from holdfast.errors import CircuitOpen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.circuit import Breaker
    from holdfast.clock import Clock
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.work import Work


class CircuitGate:
    """Asks the breakers of a handler whether one more message may be tried now.

    While a circuit is closed everybody passes. Open: nobody. Half-open: as many at a time
    as there are permits left. Only those count that were let in to try the circuit this
    time: a handler that hangs since before, or since an earlier try, keeps nobody out.
    """

    def __init__(self, routes: Iterable[Route], clock: Clock) -> None:
        self._clock = clock
        self._routes = list(routes)
        self._trying: defaultdict[Breaker, dict[Work, tuple[int, float]]] = defaultdict(dict)
        """Who tries a circuit that is not closed: in which of its generations, since when."""
        self._lock = threading.Lock()

    def listen(self, wake: Callable[[], None]) -> list[Callable[[], None]]:
        """Call *wake* whenever a circuit changes; return what ends that."""
        breakers = {breaker for route in self._routes for breaker in route.breakers}
        return [breaker.listen(lambda _event: wake()) for breaker in breakers]

    @staticmethod
    def is_free(route: Route) -> bool:
        """Whether everybody passes: every circuit of *route* is closed."""
        for one in route.breakers:  # noqa: SIM110 - asked for each message
            if not isinstance(one.state, Closed):
                return False
        return True

    def enter(self, work: Work) -> bool:
        """Let *work* in if every circuit of its handler has room."""
        if self.is_free(work.route):
            return True
        ailing = [one for one in work.route.breakers if not isinstance(one.state, Closed)]
        with self._lock:
            if not all(self._has_room(breaker) for breaker in ailing):
                return False
            now = self._clock.monotonic()
            for breaker in ailing:
                self._trying[breaker][work] = coming_generation(breaker.state, now), now
            return True

    def left(self, work: Work) -> None:
        """Note that *work* does not run any more."""
        if not self._trying:
            return
        with self._lock:
            for breaker in work.route.breakers:
                if breaker in self._trying:
                    self._trying[breaker].pop(work, None)

    def has_room(self, work: Work) -> bool:
        """Whether *work* would be let in now."""
        with self._lock:
            return all(self._has_room(breaker) for breaker in work.route.breakers)

    def shut(self, in_hand: Callable[[], Iterable[Work]]) -> set[Route]:
        """Return the handlers whose intake is to be paused; *in_hand* is asked only if need be.

        A circuit that may be tried needs messages to try it with: the intake of its topics
        goes on until as many are in hand as there are permits left. Those that have tried it in
        vain do not count: perhaps the fault is theirs, and what comes after them would pass.
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
            trying = {breaker: set(self._who_tries(breaker)) for breaker in ailing}
        for work in in_hand():
            for breaker in work.route.breakers:
                if breaker not in room:
                    continue
                if takes_permit(work, tries=work in trying[breaker]):
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
        return len(self._who_tries(breaker)) < self._permits(breaker)

    def _who_tries(self, breaker: Breaker) -> list[Work]:
        """Return who is trying *breaker* now and may still report in time."""
        now, state = self._clock.monotonic(), breaker.state
        if isinstance(state, Closed):
            return []
        coming, longest = coming_generation(state, now), breaker.policy.probe_seconds
        return [
            work
            for work, (generation, since) in self._trying[breaker].items()
            if generation == coming and now - since < longest
        ]

    def _permits(self, breaker: Breaker) -> float:
        return permits(breaker.state, breaker.policy, self._clock.monotonic())


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
