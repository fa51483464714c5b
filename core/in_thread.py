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
        await _ended(running)
        raise


async def _ended(running: asyncio.Future[R]) -> None:
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue  # asked twice; the thread still runs
    if not running.cancelled():
        running.exception()  # nobody else will ask for it
