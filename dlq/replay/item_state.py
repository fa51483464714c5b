"""Where the messages of a plan are; all that a consumer, which confirms them, needs of plans."""

from __future__ import annotations

from enum import StrEnum


class ItemState(StrEnum):
    """Where one message of a plan is.

    Stored are `CLAIMED` and what follows an outcome; a claimed item below the plan's
    sent mark is `SENT`: one row is written for a whole batch.
    """

    CLAIMED = "claimed"
    SENT = "sent"
    CONFIRMED = "confirmed"
    FAILED_AGAIN = "failed_again"
    UNKNOWN = "unknown"
    """Sent, and nobody said what became of it in time."""
    HELD = "held"
    """Kept back: a newer event of its key was handled, or an earlier one failed again."""
    PARKED = "parked"
    """Replayed too often; only a person lets it go."""
    SKIPPED = "skipped"
    """Cannot be replayed: masked, forgotten, closed meanwhile."""


NOT_CLAIMED = tuple(sorted(frozenset(ItemState) - {ItemState.CLAIMED, ItemState.SENT}))
"""Stored states of an item of which something is known: few of a plan that is being sent, and
found by name in an index."""
OUTCOMES = frozenset({ItemState.CONFIRMED, ItemState.FAILED_AGAIN})
WAITING = frozenset({ItemState.CLAIMED, ItemState.UNKNOWN})
"""Stored states of an item that still has a live claim."""
