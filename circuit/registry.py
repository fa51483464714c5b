"""Breakers by name: whoever names the same dependency shares its breaker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.circuit.breaker import Breaker
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.circuit.policy import CircuitPolicy


class Breakers:
    """The breakers of a process, one for each name."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a listener may ask for another breaker
        self._known: dict[str, Breaker] = {}
        self._stated: set[str] = set()
        self._watchers: list[Callable[[Breaker], None]] = []

    def get(self, name: str, policy: CircuitPolicy | None = None) -> Breaker:
        """Return the breaker of *name*, made on first use.

        Its *policy* may be stated by any one of its users, whichever is imported first;
        two different ones are refused.
        """
        with self._lock:
            breaker = self._known.get(name)
            if breaker is None:
                breaker = self._known[name] = Breaker(name, policy, clock=self._clock)
                for watch in self._watchers:
                    watch(breaker)
            elif policy is not None and policy != breaker.policy:
                if name in self._stated:
                    raise ConfigurationError(
                        f"the circuit {name!r} has another policy already, {breaker.policy}: "
                        "state it in one place"
                    )
                breaker.adopt(policy)
            if policy is not None:
                self._stated.add(name)
            return breaker

    def watch(self, watcher: Callable[[Breaker], None]) -> None:
        """Call *watcher* with every breaker there is and with every one to come."""
        with self._lock:
            self._watchers.append(watcher)
            for breaker in self._known.values():
                watcher(breaker)

    def __iter__(self) -> Iterator[Breaker]:
        with self._lock:
            return iter(list(self._known.values()))


BREAKERS = Breakers()
"""The breakers that `@circuit("name")` uses."""
