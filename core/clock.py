"""Time and randomness as ports: the policy decides, the clock waits.

Deadlines: how much time the running work has left, readable from anywhere inside it.
"""

from __future__ import annotations

import math
import random
import time
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.errors import AttemptTimeout

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


Randomness = random.Random
"""Where jitter comes from; pass `random.Random(seed)` for repeatable runs."""


class Clock(Protocol):
    """The only way Holdfast reads or waits for time."""

    def now(self) -> datetime:
        """Return the wall-clock time, aware and in UTC. Never used to decide order."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never run backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread for *seconds*."""
        ...

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this task for *seconds*."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block until *event* is set or *seconds* have passed; return whether it is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Return the machine's time in UTC."""
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)
    """The machine's monotonic seconds: asked several times a message, so without a frame."""

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this task."""
        import asyncio  # slow to import, and loaded already wherever this is called

        await asyncio.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block on *event*."""
        return event.wait(seconds)


SYSTEM_CLOCK = SystemClock()


def seconds_since_epoch(moment: datetime) -> float:
    """Return *moment* as POSIX seconds; a naive datetime is refused."""
    if moment.tzinfo is None:
        raise ValueError(f"naive datetime {moment!r}: attach a timezone, e.g. datetime.now(UTC)")
    return moment.timestamp()


def system_randomness() -> random.Random:
    """Return a generator seeded by the operating system."""
    return random.SystemRandom()


def fixed(moment: datetime) -> Callable[[], datetime]:
    """Return a source of one constant moment."""
    return lambda: moment


class Deadline(msgspec.Struct, frozen=True):
    """A moment by which work is to end."""

    until: float
    seconds: float
    clock: Clock
    is_cut: Callable[[], bool] | None = None
    """Whether an event loop has interrupted the work because of this deadline."""

    def remaining(self) -> float:
        """Return the seconds left, 0 when there are none."""
        return max(0.0, self.until - self.clock.monotonic())

    def is_over(self) -> bool:
        """Whether the time is up, or an event loop has cut the work short because of it."""
        return (self.is_cut is not None and self.is_cut()) or self.remaining() == 0


def is_seconds(value: object) -> bool:
    """Whether *value* is a time that something may take."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_CURRENT: ContextVar[Deadline | None] = ContextVar("holdfast_deadline", default=None)


def within(seconds: float, clock: Clock, *, is_cut: Callable[[], bool] | None = None) -> Deadline:
    """Return the deadline *seconds* from now, or the current one's moment if that is earlier."""
    until = clock.monotonic() + seconds
    outer = _CURRENT.get()
    if outer is not None and outer.until < until:
        until = outer.until
    return Deadline(until, seconds, clock, is_cut)


begin: Callable[[Deadline], Token[Deadline | None]] = _CURRENT.set
"""Makes a deadline the current one until `end`."""
end: Callable[[Token[Deadline | None]], None] = _CURRENT.reset
"""Makes the deadline before a token the current one again."""


def current_deadline() -> Deadline | None:
    """Return the deadline of the work that runs in this thread or task."""
    return _CURRENT.get()


def remaining() -> float | None:
    """Return the seconds left for the running attempt, 0 when none; None without a limit.

    Pass it on as the timeout of the call you make: `get(url, timeout=remaining())`.
    A thread that the handler starts by itself does not inherit it.
    """
    deadline = _CURRENT.get()
    return None if deadline is None else deadline.remaining()


def checkpoint() -> None:
    """Raise `AttemptTimeout` if the time of the running attempt is up: a place to stop early."""
    deadline = _CURRENT.get()
    if deadline is not None and deadline.is_over():
        raise AttemptTimeout(deadline.seconds)
