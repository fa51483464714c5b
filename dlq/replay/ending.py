"""How a run of a plan ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from holdfast.dlq.replay.state import ItemState, PlanState

if TYPE_CHECKING:
    from holdfast.dlq.replay.plan import Plan, Tally


class EndingKind(StrEnum):
    """What an operator must know first."""

    CONFIRMED = "confirmed"
    """Every message of the plan."""
    PARTLY = "partly"
    """Done; some failed again or were set aside."""
    STOPPED = "stopped"
    """By a stop condition."""
    UNCONFIRMED = "unconfirmed"
    """All were sent, and the consumer has not spoken for some."""
    PAUSED = "paused"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended, and why."""

    kind: EndingKind
    plan_id: str
    reason: str = ""

    @classmethod
    def finished(cls, plan: Plan, counts: Tally) -> Ending:
        """Return the ending of a plan of which every item is settled."""
        confirmed = counts[ItemState.CONFIRMED]
        if confirmed == plan.total and not counts.aside:
            return cls(EndingKind.CONFIRMED, plan.id, f"all {confirmed:,} confirmed")
        rest = ", ".join(
            f"{counts[state]:,} {state.value.replace('_', ' ')}"
            for state in (
                ItemState.FAILED_AGAIN, ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED,
            )
            if counts[state]
        )  # fmt: skip
        return cls(EndingKind.PARTLY, plan.id, f"{confirmed:,} confirmed, {rest}")

    @classmethod
    def interrupted(cls, plan: Plan) -> Ending:
        """Return the ending of a plan that somebody paused, stopped or aborted."""
        match plan.state:
            case PlanState.ABORTED:
                return cls(EndingKind.ABORTED, plan.id, "aborted by an operator")
            case PlanState.STOPPED:
                return cls(EndingKind.STOPPED, plan.id, plan.stopped_because or "stopped")
            case _:
                return cls(EndingKind.PAUSED, plan.id, "paused by an operator")
