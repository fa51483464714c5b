"""Waiting for a condition, never for the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """A condition did not come true in time; says which, and what it was last."""

    def __init__(self, what: str, deadline: float, last: object) -> None:
        super().__init__(f"{what}: not within {deadline:g} s; last seen: {_shown(last)}")
        self.what = what
        self.deadline = deadline
        self.last = last


def wait_until(
    condition: Callable[[], T],
    *,
    deadline: float = 60.0,
    what: str = "the condition",
    every: float = 0.01,
    clock: Clock = SYSTEM_CLOCK,
) -> T:
    """Return the first truthy value of *condition*, asked again every few milliseconds.

    An exception counts as "not yet" and is the cause of the `WaitTimeout` that follows if
    it never stops. The condition is asked at least once, and once more after the deadline.
    """
    until = clock.monotonic() + deadline
    while True:
        is_last = clock.monotonic() >= until
        last: T | None = None
        failure: Exception | None = None
        try:
            last = condition()
        except Exception as error:  # noqa: BLE001 - whatever it is, it may pass
            failure = error
        if last:
            return last
        if is_last:
            raise WaitTimeout(what, deadline, failure or last) from failure
        clock.sleep(every)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}…"
