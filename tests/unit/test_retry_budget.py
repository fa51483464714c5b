"""The retry budget is shared, thread-safe and never overdrawn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ConfigurationError
from holdfast.retry import Budget, retry
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = st.lists(
    st.one_of(st.just("call"), st.just("retry"), st.floats(min_value=0.001, max_value=15)),
    max_size=120,
)


@given(STEPS, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.3, 2.0]))
def test_withdrawals_never_exceed_what_the_window_grants(
    steps: list[str | float], ratio: float, per_second: float
) -> None:
    """When one is granted, in 10 seconds: retries ≤ ratio × calls (of 11 s) + 10 × per second."""
    clock = VirtualClock()
    budget = Budget(ratio=ratio, per_second=per_second, window=10, clock=clock)
    calls: list[float] = []
    retries: list[float] = []
    for step in steps:
        now = clock.monotonic()
        if step == "call":
            budget.deposit()
            calls.append(now)
        elif step == "retry":
            if budget.withdraw():
                retries.append(now)
                recent = [at for at in retries if at > now - 10]
                granted = 10 * per_second + ratio * sum(at > now - 11.001 for at in calls)
                assert len(recent) <= granted + 1e-6
        else:
            clock.advance(float(step))
        assert budget.balance() >= 0


def test_a_spent_budget_recovers_with_time() -> None:
    """What was withdrawn is forgotten after the window."""
    clock = VirtualClock()
    budget = Budget(ratio=0, per_second=1, window=2, clock=clock)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    clock.advance(2.5)
    assert budget.withdraw()


def test_threads_cannot_overdraw_together() -> None:
    """A hundred retries are granted, whoever asks."""
    budget = Budget(ratio=0, per_second=10, window=10, clock=VirtualClock())
    granted: list[bool] = []

    def ask() -> None:
        granted.extend([budget.withdraw() for _ in range(50)])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 100


def test_no_call_is_lost_whatever_thread_makes_it_and_however_often_one_looks() -> None:
    """Four threads note 4,000 calls while two look; then just as many retries are granted."""
    budget = Budget(ratio=1, per_second=0, window=10, clock=VirtualClock())

    def work(step: Callable[[], object]) -> None:
        for _ in range(1000):
            step()

    steps = [budget.deposit] * 4 + [budget.balance] * 2
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [budget.withdraw() for _ in range(4001)] == [True] * 4000 + [False]


def test_calls_that_nobody_looked_at_are_forgotten_with_their_window() -> None:
    """They count as of when they were made, not as of when somebody asks."""
    clock = VirtualClock()
    budget = Budget(ratio=1, per_second=0, window=10, clock=clock)
    for _ in range(5):
        budget.deposit()
    clock.advance(9)
    budget.deposit()
    clock.advance(3)
    assert budget.balance() == 1
    clock.advance(9)
    assert budget.balance() == 0


def test_one_name_is_one_budget() -> None:
    """Two handlers of one dependency share it; two sets of settings are refused."""
    first = Budget.named("gateway-of-this-test", ratio=0.5)
    assert retry(budget="gateway-of-this-test").budget is first
    with pytest.raises(ConfigurationError, match="one place"):
        Budget.named("gateway-of-this-test", ratio=0.1)
