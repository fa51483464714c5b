"""Blocking work of `async def`: a cancelled task waits for the thread that works for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.concurrency import to_the_end

NEVER = 30.0


def test_it_returns_what_the_function_returns() -> None:
    """And raises what it raises."""

    async def ask() -> tuple[int, str]:
        with pytest.raises(ValueError, match="no"):
            await to_the_end(int, "no")
        return await to_the_end(int, "7"), await to_the_end("{x}".format, x=1)

    assert asyncio.run(ask()) == (7, "1")


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_task_ends_only_after_its_thread(times: int) -> None:
    """However often it is cancelled: nobody else may touch what the thread uses."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(NEVER)
        ended.set()

    async def cancel() -> None:
        task = asyncio.ensure_future(to_the_end(work))
        while not begun.is_set():
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(cancel())
