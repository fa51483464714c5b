"""Blocking work for `async def`: in a thread, and to its end even when the task is cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

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
