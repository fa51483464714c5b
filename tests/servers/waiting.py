"""Waiting on a condition, never on the clock."""

import time
from collections.abc import Callable


class DeadlineExceeded(AssertionError):
    """A condition did not become true in time."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    """Return as soon as *condition* holds; raise DeadlineExceeded naming *what* after *seconds*."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"still waiting for {what} after {seconds:g} s")
        time.sleep(0.02)  # pacing: between looks at the condition
