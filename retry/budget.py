"""The retry budget: retries in proportion to calls, so that an outage is not multiplied."""

from __future__ import annotations

import itertools
import math
import threading
from typing import ClassVar, TypedDict, Unpack

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, DependencyDown

_SLICES = 10


class BudgetSpent(DependencyDown):
    """So many calls of dependency *name* fail that no retry is left: the message waits."""

    def __init__(self, name: str) -> None:
        whose = f" of {name!r}" if name else ""
        super().__init__(f"the retry budget{whose} is spent: too much fails, the message waits")
        self.name = name


class BudgetOptions(TypedDict, total=False):
    """What a named budget is made with."""

    ratio: float
    per_second: float
    window: float
    clock: Clock


class Budget:
    """At most *ratio* retries per call, plus *per_second*, over the last *window* seconds.

    Every call deposits, every retry withdraws when it is *scheduled*: retries that wait
    have been paid for, so a crowd of them cannot all be let through at once. Threads share
    it; give one object, or one name, to everything that calls the same dependency.
    """

    _named: ClassVar[dict[str, Budget]] = {}
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        *,
        ratio: float = 0.2,
        per_second: float = 10.0,
        window: float = 10.0,
        name: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not 0 <= ratio < math.inf or not 0 <= per_second < math.inf:
            raise ConfigurationError(
                f"Budget(ratio={ratio}, per_second={per_second}): use finite numbers, 0 or more"
            )
        if not 0 < window < math.inf:
            raise ConfigurationError(f"Budget(window={window}): use seconds above 0")
        self.name = name
        self.ratio, self.per_second, self.window = ratio, per_second, window
        self._monotonic = clock.monotonic
        self._lock = threading.Lock()
        self._per_slice = _SLICES / window
        # One slice more than the window: what is still inside it is never forgotten early.
        self._calls = [0] * (_SLICES + 1)
        self._retries = [0] * (_SLICES + 1)
        self._slice = int(clock.monotonic() * self._per_slice)
        self._here = self._slice % (_SLICES + 1)
        self._until = 0.0
        """When the slice ends; before that a call is noted without the lock."""
        self._ticks = itertools.count()
        """One for each call, whatever thread makes it, and one for each look at them."""
        self._seen = 0

    @classmethod
    def named(cls, name: str, **settings: Unpack[BudgetOptions]) -> Budget:
        """Return the one budget of dependency *name* in this process, made on first use."""
        with cls._naming:
            known = cls._named.get(name)
            if known is None:
                known = cls._named[name] = cls(name=name, **settings)
            elif any(getattr(known, key, value) != value for key, value in settings.items()):
                raise ConfigurationError(
                    f"Budget.named({name!r}) exists with ratio={known.ratio}, "
                    f"per_second={known.per_second}, window={known.window}: "
                    "state its settings in one place"
                )
            return known

    def deposit(self) -> None:
        """Note a call."""
        if self._monotonic() >= self._until:
            with self._lock:
                self._look()
        next(self._ticks)

    def withdraw(self) -> bool:
        """Take one retry out of the budget; False, and nothing taken, if there is none left."""
        with self._lock:
            if self._left() < 1:
                return False
            self._retries[self._here] += 1
            return True

    def balance(self) -> float:
        """Return how many retries could be scheduled now."""
        with self._lock:
            return max(0.0, self._left())

    def _left(self) -> float:
        self._look()
        granted = self.per_second * self.window + self.ratio * sum(self._calls)
        return granted - sum(self._retries)

    def _look(self) -> None:
        """Write down the calls since the last look, and go on to the slice of this moment."""
        ticks = next(self._ticks)
        self._calls[self._here] += ticks - self._seen
        self._seen = ticks + 1
        now = int(self._monotonic() * self._per_slice)
        if now > self._slice:
            self._roll(now)
        self._until = (self._slice + 1) / self._per_slice

    def _roll(self, now: int) -> None:
        """Forget the slices that lie further back than the window."""
        for passed in range(max(self._slice + 1, now - _SLICES), now + 1):
            self._calls[passed % (_SLICES + 1)] = self._retries[passed % (_SLICES + 1)] = 0
        self._slice, self._here = now, now % (_SLICES + 1)
