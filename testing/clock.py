"""A clock that stands still until the test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from holdfast.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

START = datetime(2030, 1, 1, tzinfo=UTC)
"""The wall-clock moment at which every virtual clock starts."""

_MONOTONIC_START = 1_000 * 10**9
_GLANCE = 0.002  # an Event cannot be waited for together with a sleeper's wake-up


@dataclass(slots=True, order=True)
class _Sleeper:
    """Whoever waits for a moment; ordered by it, then by arrival."""

    due: int
    order: int
    wake: Callable[[], None] = field(compare=False)
    gone: threading.Event = field(compare=False, default_factory=threading.Event)
    is_task: bool = field(compare=False, default=False)


class VirtualClock:
    """A `Clock` for tests: `advance` moves it, and nothing else does.

    Whoever sleeps or waits blocks until the clock was advanced far enough. With
    `auto=True` the sleeping itself advances the clock and returns at once, which suits
    tests of a single thread. Threads may share one clock.
    """

    def __init__(self, start: datetime = START, *, auto: bool = False) -> None:
        if start.tzinfo is None:
            raise ValueError(f"start {start!r} is naive: attach a timezone, e.g. datetime.now(UTC)")
        self._start = start.astimezone(UTC)
        self._auto = auto
        self._elapsed = 0  # nanoseconds: ten steps of 0.1 s are exactly one second
        self._skew = timedelta()
        self._lock = threading.Lock()
        self._moving = threading.RLock()
        self._sleepers: list[_Sleeper] = []
        self._arrivals = itertools.count()

    def now(self) -> datetime:
        """Return the virtual wall-clock time in UTC."""
        with self._lock:
            return self._start + timedelta(microseconds=self._elapsed // 1000) + self._skew

    def monotonic(self) -> float:
        """Return the virtual monotonic seconds; `jump_wall` does not change them."""
        with self._lock:
            return (_MONOTONIC_START + self._elapsed) / 10**9

    def sleep(self, seconds: float) -> None:
        """Block this thread until the clock was advanced by *seconds*."""
        if self._auto:
            self.advance(max(seconds, 0.0))
        elif seconds > 0:
            woken = threading.Event()
            sleeper = self._enter(seconds, woken.set)
            try:
                woken.wait()
            finally:
                sleeper.gone.set()

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this task until the clock was advanced by *seconds*."""
        if self._auto or seconds <= 0:
            self.advance(max(seconds, 0.0) if self._auto else 0.0)
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        sleeper = self._enter(seconds, lambda: _call_in(loop, woken.set), is_task=True)
        try:
            await woken.wait()
        finally:
            sleeper.gone.set()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block until *event* is set or the clock was advanced by *seconds*."""
        if event.is_set() or seconds <= 0:
            return event.is_set()
        if self._auto:
            self.advance(seconds)
            return event.is_set()
        due = threading.Event()
        sleeper = self._enter(seconds, due.set)
        try:
            while not event.wait(_GLANCE) and not due.is_set():
                pass
        finally:
            sleeper.gone.set()
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move both clocks by *seconds*, and wake whoever is due by then, earliest first.

        Each sleeper sees the clock at its own due moment or later, and has left its sleep
        before the next one is woken. A thread that falls asleep again at once may or may
        not be woken a second time: to step such a loop, call `wait_for_sleepers` and
        advance once per round.
        """
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s: time runs forward; see jump_wall")
        with self._moving:
            target = self._elapsed + _nanoseconds(seconds)
            while (sleeper := self._next(target)) is not None:
                sleeper.wake()
                if not sleeper.is_task:  # a task may need this very thread to leave its sleep
                    sleeper.gone.wait()

    def jump_wall(self, seconds: float) -> None:
        """Move the wall clock alone, in either direction, as an operator or NTP does."""
        with self._lock:
            self._skew += timedelta(seconds=seconds)

    @property
    def sleepers(self) -> int:
        """How many threads and tasks wait for this clock now."""
        with self._lock:
            return sum(not sleeper.gone.is_set() for sleeper in self._sleepers)

    def wait_for_sleepers(self, count: int = 1, *, deadline: float = 60.0) -> None:
        """Wait, in real time, until at least *count* threads and tasks wait for this clock."""
        wait_until(
            lambda: self.sleepers >= count,
            deadline=deadline,
            what=f"{count} sleeper(s) on the virtual clock",
        )

    def _enter(
        self, seconds: float, wake: Callable[[], None], *, is_task: bool = False
    ) -> _Sleeper:
        with self._lock:
            due = self._elapsed + _nanoseconds(seconds)
            sleeper = _Sleeper(due, next(self._arrivals), wake, is_task=is_task)
            heapq.heappush(self._sleepers, sleeper)
        return sleeper

    def _next(self, target: int) -> _Sleeper | None:
        """Step to the next due sleeper and return it; with none left, step to *target*."""
        with self._lock:
            while self._sleepers and self._sleepers[0].due <= target:
                sleeper = heapq.heappop(self._sleepers)
                if not sleeper.gone.is_set():
                    self._elapsed = max(self._elapsed, sleeper.due)
                    return sleeper
            self._elapsed = max(self._elapsed, target)
            return None


def _nanoseconds(seconds: float) -> int:
    # A remainder below the resolution still passes, or who waits for it would never end.
    return max(round(seconds * 10**9), 1 if seconds > 0 else 0)


def _call_in(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and its tasks with it
        loop.call_soon_threadsafe(action)
