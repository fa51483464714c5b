"""Blocking work for `async def`: in a thread, and to its end even when the task is cancelled.

SIGTERM and SIGINT, heard by a thread that waits for nothing else.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


P = ParamSpec("P")
R = TypeVar("R")


async def to_the_end(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what *function* returns in a thread.

    A thread cannot be stopped. A task that is cancelled meanwhile goes on being cancelled
    only when the thread has ended, so that nobody else uses its session at the same time.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await ended(running)
        raise


async def done_anyway(running: asyncio.Future[R]) -> R:
    """Return what *running* returns, also to a task that is cancelled meanwhile.

    For what cannot be taken back: a commit that has happened is no attempt that was cut off.
    Only if it fails, the task goes on being cancelled.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await ended(running)
        if running.cancelled() or running.exception() is not None:
            raise
        return running.result()


async def ended(running: asyncio.Future[R]) -> None:
    """Return once *running* has ended, however often the task is cancelled meanwhile."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue  # asked twice; the thread still runs
    if not running.cancelled():
        running.exception()  # nobody else will ask for it


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MOMENT = 1.0
"""Seconds within which a further signal is the same wish said twice."""


@contextmanager
def signals_heard(handle: Callable[[int], None], *, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Call *handle* in a thread of its own for each SIGTERM or SIGINT that comes meanwhile.

    One that follows within `MOMENT` is not another: `timeout`, terminals and supervisors send
    a signal to a process and to its group, and nobody has insisted on anything by that.

    A handler that runs in the main thread may find it inside the very lock that the handler
    needs, as when it sets the event that the main thread waits for, and then nothing ends
    any more. Nor does it run while the main thread is busy in a library. To be used in the
    main thread only.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        last = -math.inf
        with open(reading, "rb", buffering=0) as pipe:
            while said := pipe.read(1):
                if said[0] in _SIGNALS and clock.monotonic() - last >= MOMENT:
                    handle(said[0])
                    last = clock.monotonic()  # what came meanwhile is no other wish

    threading.Thread(target=listen, name="holdfast-signals", daemon=True).start()
    heard_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _ignored) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(heard_before)
        os.close(writing)


def _ignored(_number: int, _frame: object) -> None:
    """Let the thread hear it: with no handler at all the signal would end the process."""
