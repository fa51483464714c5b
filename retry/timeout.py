"""The time limit of one attempt."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, ClassVar

from holdfast.call import Call, Stage
from holdfast.clock import Deadline, begin, current_deadline, end, is_seconds, within
from holdfast.errors import AttemptTimeout, ConfigurationError
from holdfast.layer import Layer

if TYPE_CHECKING:
    from contextvars import Token

log = logging.getLogger("holdfast.retry")


class Timeout(Layer):
    """Bounds each attempt of the decorated function.

    An `async def` is interrupted: its task is cancelled at the next await, and
    `AttemptTimeout` is raised in its place. The event loop measures this time, as only the
    loop can interrupt.

    A `def` is **not** interrupted, for nothing can stop a thread safely: a lock or a
    transaction would be left half done. It can ask `remaining()` and pass the answer on as
    the timeout of what it calls, or stop by itself at a `checkpoint()`. An attempt that
    overruns is logged, and what it returned counts: the work has been done.
    """

    stage: ClassVar[Stage] = Stage.ATTEMPT
    label: ClassVar[str] = "@timeout"

    def __init__(self, seconds: float) -> None:
        if not is_seconds(seconds):
            raise ConfigurationError(
                f"@timeout({seconds!r}): use seconds above 0, e.g. @timeout(5)"
            )
        self.seconds = seconds

    def describe(self) -> str:
        """Say the limit."""
        return f"{self.seconds:g} s for each attempt"

    def enter(self, call: Call) -> None:
        """Start the attempt's time."""
        deadline = within(self.seconds, call.clock)
        call.notes[self] = begin(deadline), deadline

    def leave(self, call: Call) -> None:
        """End it; a late result is still a result."""
        started: tuple[Token[Deadline | None], Deadline] = call.notes.pop(self)
        token, deadline = started
        end(token)
        if call.clock.monotonic() >= deadline.until:
            log.warning(
                "attempt %d took longer than its limit of %g s and could not be interrupted: "
                "pass holdfast.retry.remaining() to what it calls",
                call.attempt,
                self.seconds,
            )

    def fail(self, call: Call, error: BaseException) -> None:
        """End it."""
        self.leave(call)

    async def enter_async(self, call: Call) -> None:
        """Start the attempt's time, and have the loop watch it."""
        outer = current_deadline()
        limit = asyncio.timeout(
            self.seconds if outer is None else min(self.seconds, outer.remaining())
        )
        await limit.__aenter__()
        deadline = within(self.seconds, call.clock, is_cut=limit.expired)
        call.notes[self] = begin(deadline), limit

    async def leave_async(self, call: Call) -> None:
        """End it."""
        await self._end_async(call).__aexit__(None, None, None)

    async def fail_async(self, call: Call, error: BaseException) -> None:
        """End it; a cancellation that was ours becomes `AttemptTimeout`."""
        try:
            await self._end_async(call).__aexit__(type(error), error, error.__traceback__)
        except TimeoutError:
            raise AttemptTimeout(self.seconds) from error

    def _end_async(self, call: Call) -> asyncio.Timeout:
        started: tuple[Token[Deadline | None], asyncio.Timeout] = call.notes.pop(self)
        token, limit = started
        end(token)
        return limit


def timeout(seconds: float) -> Timeout:
    """Bound each attempt of the decorated function to *seconds*; see `Timeout`."""
    return Timeout(seconds)
