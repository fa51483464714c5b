"""Time and randomness as ports: the policy decides, the clock waits."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

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
