"""Waiting for a condition ends with its value, or says what was seen last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.testing import VirtualClock, WaitTimeout, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_first_true_value_is_returned() -> None:
    """The condition is asked until it has something to say."""
    answers: Iterator[object] = iter([None, [], 0, "yes", "no"])
    assert wait_until(lambda: next(answers)) == "yes"


def test_a_condition_that_stays_false_is_described() -> None:
    """The error names the condition, the deadline and the last value."""
    with pytest.raises(WaitTimeout, match=r"five rows: not within 0.02 s; last seen: \(\)") as it:
        wait_until(tuple, deadline=0.02, what="five rows")
    assert it.value.last == ()
    assert isinstance(it.value, AssertionError)


def test_an_exception_means_not_yet() -> None:
    """A server that refuses connections may still come up."""
    tries: list[int] = []

    def condition() -> bool:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("refused")
        return True

    assert wait_until(condition)


def test_an_exception_that_stays_is_the_cause() -> None:
    """The error shows why the condition could not be asked."""

    def condition() -> bool:
        raise ConnectionError("refused")

    with pytest.raises(WaitTimeout, match="refused") as it:
        wait_until(condition, deadline=0.02)
    assert isinstance(it.value.__cause__, ConnectionError)


def test_an_interrupt_is_not_a_condition() -> None:
    """Ctrl-C ends the waiting."""

    def condition() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_until(condition)


def test_the_condition_is_asked_once_even_without_time() -> None:
    """A deadline of zero is a check."""
    assert wait_until(lambda: True, deadline=0)
    with pytest.raises(WaitTimeout):
        wait_until(lambda: False, deadline=0)


def test_it_waits_by_the_clock_it_is_given() -> None:
    """On a virtual clock an hour's deadline takes no time."""
    clock = VirtualClock(auto=True)
    started = clock.monotonic()
    with pytest.raises(WaitTimeout):
        wait_until(lambda: False, deadline=3600, every=60, clock=clock)
    assert clock.monotonic() - started >= 3600
