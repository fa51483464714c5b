"""Somebody else who reads our slot."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.outbox.wal.faults import SlotBusy

log = logging.getLogger("holdfast.outbox.wal")

_PATIENCE_SECONDS = 5.0  # a relay that was ended leaves the slot within this


class Stranger:
    """Keeps a relay off its slot; one that stays is told of, for it would go on for ever."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._text: str | None = None

    @property
    def named(self) -> str | None:
        """What the server says of the stranger, once it is plain that it stays."""
        return self._text

    def seen(self, error: SlotBusy) -> None:
        """Note that the slot is taken."""
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
            log.info("standing by: %s", error)
        elif self._text is None and now - self._since >= _PATIENCE_SECONDS:
            log.error("a stranger reads our slot, end it or choose another --slot: %s", error)
            self._text = str(error)

    def gone(self) -> None:
        """Note that the slot is ours, or no longer our business."""
        self._since = self._text = None
