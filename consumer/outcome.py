"""What became of one message that a user's own loop handed to a handler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """How the handling of a message ended."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    DEAD_LETTERED = "dead-lettered"
    HELD_BACK = "held-back"
    """A replayed message that stays a dead letter: an earlier one of its key failed again."""
    SKIPPED = "skipped"
    """A replay for another group: nothing of it is handled here."""
    WITHDRAWN = "withdrawn"
    """A replayed copy that came too late: its plan was aborted, or its letter closed or edited."""
    FAILED = "failed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to tell the broker: acknowledge, or give back, with or without blame."""

    ending: Ending
    error: BaseException | None = None

    @property
    def acknowledge(self) -> bool:
        """Whether the message is done with."""
        return self.ending not in (Ending.FAILED, Ending.RELEASED)

    @property
    def blame(self) -> bool:
        """Whether a message given back counts as a failed attempt."""
        return self.ending is Ending.FAILED
