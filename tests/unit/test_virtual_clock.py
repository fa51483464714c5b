"""The virtual clock moves only when told, and wakes sleepers in due order."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from holdfast.testing import VirtualClock, WaitTimeout, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.clock import Clock


def run(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def test_it_stands_still_until_advanced() -> None:
    """Reading the clock does not move it."""
    clock: Clock = VirtualClock()
    assert (clock.now(), clock.monotonic()) == (clock.now(), clock.monotonic())


def test_every_virtual_clock_starts_at_the_same_moment() -> None:
    """Runs are repeatable."""
    assert VirtualClock().now() == VirtualClock().now() == datetime(2030, 1, 1, tzinfo=UTC)


def test_advancing_moves_both_clocks_without_drift() -> None:
    """Ten steps of a tenth are exactly one."""
    clock = VirtualClock()
    before, started = clock.now(), clock.monotonic()
    for _ in range(10):
        clock.advance(0.1)
    assert clock.now() - before == timedelta(seconds=1)
    assert clock.monotonic() - started == 1.0


def test_time_does_not_run_backwards() -> None:
    """Only the wall clock can be set back."""
    with pytest.raises(ValueError, match="jump_wall"):
        VirtualClock().advance(-1)


def test_a_naive_start_is_refused() -> None:
    """A moment without a timezone is no moment."""
    with pytest.raises(ValueError, match="naive"):
        VirtualClock(datetime(2030, 1, 1))  # noqa: DTZ001 - that is the point


def test_jumping_the_wall_leaves_the_monotonic_clock_alone() -> None:
    """An operator who sets the clock back does not undo elapsed time."""
    clock = VirtualClock()
    before, started = clock.now(), clock.monotonic()
    clock.jump_wall(-3600)
    assert clock.now() == before - timedelta(hours=1)
    assert clock.monotonic() == started


def test_a_jump_wakes_nobody() -> None:
    """Sleeping is by the monotonic clock."""
    clock = VirtualClock()
    threads = run(lambda: clock.sleep(5))
    clock.wait_for_sleepers(1)
    clock.jump_wall(10)
    assert clock.sleepers == 1
    clock.advance(5)
    threads[0].join(60)
    assert clock.sleepers == 0


def test_sleepers_wake_in_due_order_at_their_own_moment() -> None:
    """Whoever is due earlier leaves its sleep before the next one is woken."""
    clock = VirtualClock()
    started = clock.monotonic()
    woken: list[int] = []

    def sleeper(seconds: int) -> Callable[[], None]:
        def work() -> None:
            clock.sleep(seconds)
            woken.append(seconds)

        return work

    threads = run(*(sleeper(seconds) for seconds in (3, 1, 2)))
    clock.wait_for_sleepers(3)
    for number in range(3):
        clock.advance(1)
        wait_until(lambda: len(woken) > number)  # noqa: B023 - asked before the next round
    for thread in threads:
        thread.join(60)
    assert woken == [1, 2, 3]
    assert clock.monotonic() - started == 3


def test_an_advance_that_is_too_short_wakes_nobody() -> None:
    """A sleeper sleeps its whole time, however many steps it takes."""
    clock = VirtualClock()
    done = threading.Event()

    def work() -> None:
        clock.sleep(1)
        done.set()

    threads = run(work)
    clock.wait_for_sleepers()
    clock.advance(0.999)
    assert not done.wait(0.02)
    clock.advance(0.001)
    threads[0].join(60)
    assert done.is_set()


def test_a_loop_that_sleeps_can_be_stepped() -> None:
    """Waiting for the sleeper before each advance makes every round happen."""
    clock = VirtualClock()
    rounds: list[float] = []

    def work() -> None:
        for _ in range(5):
            clock.sleep(1)
            rounds.append(clock.monotonic())

    [thread] = run(work)
    for _ in range(5):
        clock.wait_for_sleepers(1)
        clock.advance(1)
    thread.join(60)
    assert [moment - rounds[0] for moment in rounds] == [0, 1, 2, 3, 4]


def test_waiting_ends_with_the_event() -> None:
    """A set event ends the wait although no time has passed."""
    clock = VirtualClock()
    event = threading.Event()
    results: list[bool] = []
    [thread] = run(lambda: results.append(clock.wait(event, 60)))
    clock.wait_for_sleepers()
    event.set()
    thread.join(60)
    assert results == [True]
    assert clock.sleepers == 0


def test_waiting_ends_with_its_time() -> None:
    """Time that runs out says that the event is not set."""
    clock = VirtualClock()
    results: list[bool] = []
    [thread] = run(lambda: results.append(clock.wait(threading.Event(), 60)))
    clock.wait_for_sleepers()
    clock.advance(60)
    thread.join(60)
    assert results == [False]


def test_nothing_to_wait_for_returns_at_once() -> None:
    """No time, or an event that is set, needs no advance."""
    clock = VirtualClock()
    event = threading.Event()
    assert clock.wait(event, 0) is False
    event.set()
    assert clock.wait(event, 60) is True
    clock.sleep(0)
    clock.sleep(-1)


def test_tasks_wake_in_due_order() -> None:
    """The test's own coroutine can advance the clock that its tasks sleep on."""

    async def main() -> list[int]:
        clock = VirtualClock()
        woken: list[int] = []

        async def sleeper(seconds: int) -> None:
            await clock.sleep_async(seconds)
            woken.append(seconds)

        async with asyncio.TaskGroup() as group:
            for seconds in (3, 1, 2):
                group.create_task(sleeper(seconds))
            await asyncio.sleep(0)
            clock.advance(3)
        return woken

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_cancelled_task_sleeps_no_more() -> None:
    """Cancelling leaves no sleeper behind."""

    async def main() -> int:
        clock = VirtualClock()
        task = asyncio.create_task(clock.sleep_async(60))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        clock.advance(60)
        return clock.sleepers

    assert asyncio.run(main()) == 0


def test_an_automatic_clock_advances_by_sleeping() -> None:
    """One thread alone needs nobody to move its clock."""
    clock = VirtualClock(auto=True)
    started = clock.monotonic()
    clock.sleep(1.5)
    assert clock.wait(threading.Event(), 2) is False
    asyncio.run(clock.sleep_async(3))
    assert clock.monotonic() - started == 6.5


def test_the_smallest_wait_passes() -> None:
    """A remainder below the clock's resolution cannot hold a loop for ever."""
    clock = VirtualClock(auto=True)
    until = clock.monotonic() + 1e-12
    while (left := until - clock.monotonic()) > 0:
        clock.sleep(left)


def test_many_threads_can_share_a_clock() -> None:
    """Every sleeper wakes, whoever advances."""
    clock = VirtualClock()
    threads = run(*(lambda n=n: clock.sleep(n % 7 + 1) for n in range(20)))
    clock.wait_for_sleepers(20)
    movers = run(*(lambda: clock.advance(2) for _ in range(4)))
    for thread in (*movers, *threads):
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_sleepers_that_never_come_are_reported() -> None:
    """The error says what was waited for."""
    with pytest.raises(WaitTimeout, match="2 sleeper"):
        VirtualClock().wait_for_sleepers(2, deadline=0.02)
