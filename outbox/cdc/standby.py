"""Waiting until whoever reads the slot is gone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.outbox.engine import Step

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.outbox.wal.faults import SlotBusy
    from holdfast.outbox.wal.waker import Waker

log = logging.getLogger("holdfast.outbox.cdc")

_LINGER_SECONDS, _SHORT = 0.5, 0.05
_PAUSE_SECONDS = 0.5


class Standby:
    """Says once that another reads the slot, and paces the looks at it.

    A reader that has just ended is still there for a moment; that is no standby.
    """

    def __init__(self, waker: Waker, *, clock: Clock) -> None:
        self._waker = waker
        self._clock = clock
        self._since: float | None = None
        self._is_said = False

    def wait(self, error: SlotBusy) -> Step:
        """Return after a pause, with what to tell of it."""
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < _LINGER_SECONDS:
            self._waker.wait(_SHORT)
            return Step()
        if not self._is_said:
            log.info("standing by: %s", error)
            self._is_said = True
        self._waker.wait(_PAUSE_SECONDS)
        return Step(idle=True, standby=True)

    def end(self) -> None:
        """Note that the slot is ours."""
        self._since, self._is_said = None, False
