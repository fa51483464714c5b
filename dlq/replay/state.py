"""The states of a plan and of its items, and how one may follow another."""

from __future__ import annotations

from enum import StrEnum

from holdfast.errors import ConfigurationError


class PlanState(StrEnum):
    """Where a plan is."""

    DRAFT = "draft"
    """Frozen, nothing sent; perhaps waiting for a second pair of eyes."""
    CANARY = "canary"
    RAMPING = "ramping"
    RUNNING = "running"
    PAUSED = "paused"
    """By an operator."""
    STOPPED = "stopped"
    """By a stop condition; the reason is kept."""
    DONE = "done"
    ABORTED = "aborted"


ACTIVE = frozenset({PlanState.CANARY, PlanState.RAMPING, PlanState.RUNNING})
ENDED = frozenset({PlanState.DONE, PlanState.ABORTED})
_OPEN = frozenset(PlanState) - ENDED
_MOVES: dict[PlanState, frozenset[PlanState]] = {
    # From → the states it may be entered from.
    PlanState.DRAFT: frozenset(),
    PlanState.CANARY: frozenset({PlanState.DRAFT, PlanState.PAUSED, PlanState.STOPPED}),
    PlanState.RAMPING: _OPEN - {PlanState.RUNNING},
    PlanState.RUNNING: _OPEN,
    PlanState.PAUSED: ACTIVE | {PlanState.DRAFT},
    PlanState.STOPPED: ACTIVE,
    PlanState.DONE: _OPEN,
    PlanState.ABORTED: _OPEN,
}


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


class NotNow(ConfigurationError):
    """The plan is in a state that does not allow this."""


def may_enter(state: PlanState) -> frozenset[PlanState]:
    """Return the states from which *state* may be entered."""
    return _MOVES[state]


def check_move(now: PlanState, wanted: PlanState) -> None:
    """Raise `NotNow` unless a plan in *now* may go to *wanted*."""
    if now not in _MOVES[wanted]:
        allowed = ", ".join(sorted(_MOVES[wanted])) or "no other state"
        raise NotNow(f"the plan is {now}: it becomes {wanted} only from {allowed}")
