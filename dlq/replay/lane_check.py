"""Checking a plan with lanes: what was planned, what the ledger says, what consumers confirmed.

Each lane of each stage is checked by itself, so that many can be at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import and_, case, func, select

from holdfast.dlq.replay.item_state import WAITING, ItemState
from holdfast.dlq.replay.plans import lane_hash
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import digest
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.schema import message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.lanes import LaneMark
    from holdfast.dlq.replay.plan import ReplayPlan


class LaneFinding(NamedTuple):
    """What one lane of one stage holds."""

    stage: int
    lane: int
    start: int
    beyond: int
    hash: str
    missing: int
    """Numbers of the range that no item has."""
    confirmed: int
    failed: int
    aside: int
    unsent: int
    """To be sent, and not yet."""
    unconfirmed: int
    """Sent, and nobody said what became of them."""
    contradictions: int
    """Confirmed although their letter is still pending: one of the two is wrong."""


def check_lane(db: Connection, plan_id: str, mark: LaneMark) -> LaneFinding:
    """Return what lane *mark* of a plan holds, counted by the database."""
    own = (
        item.c.plan_id == plan_id,
        item.c.position >= mark.start,
        item.c.position < mark.beyond,
    )
    below = case((item.c.position < mark.sent, 1), else_=0).label("below")
    query = select(item.c.state, below, func.count()).where(*own).group_by(item.c.state, "below")
    counts = {(ItemState(state), bool(sent)): n for state, sent, n in db.execute(query)}
    still_open = (
        select(func.count())
        .select_from(item)
        .join(message, message.c.dlq_id == item.c.dlq_id)
        .where(*own, and_(item.c.state == ItemState.CONFIRMED, message.c.state == PENDING))
    )

    def of(*states: ItemState, sent: bool | None = None) -> int:
        return sum(
            n for (state, below), n in counts.items()
            if state in states and (sent is None or below is sent)
        )  # fmt: skip

    return LaneFinding(
        stage=mark.stage,
        lane=mark.lane,
        start=mark.start,
        beyond=mark.beyond,
        hash=lane_hash(db, plan_id, mark.start, mark.beyond),
        missing=mark.beyond - mark.start - sum(counts.values()),
        confirmed=of(ItemState.CONFIRMED),
        failed=of(ItemState.FAILED_AGAIN),
        aside=of(ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED),
        unsent=of(*WAITING, sent=False),
        unconfirmed=of(*WAITING, sent=True),
        contradictions=db.execute(still_open).scalar_one(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """What the lanes of a plan hold together."""

    is_whole: bool
    """Whether the items are the ones that were frozen."""
    confirmed: int
    failed: int
    aside: int
    unsent: int
    unconfirmed: int
    contradictions: int

    @classmethod
    def of(cls, plan: ReplayPlan, findings: Sequence[LaneFinding]) -> PlanCheck:
        """Return what *findings* say of *plan*; all of its lanes must be among them."""
        ordered = sorted(findings, key=lambda one: (one.start, one.beyond, one.stage, one.lane))
        whole = digest(one.hash for one in ordered) == plan.hash
        return cls(
            is_whole=whole and not any(one.missing for one in findings),
            confirmed=sum(one.confirmed for one in findings),
            failed=sum(one.failed for one in findings),
            aside=sum(one.aside for one in findings),
            unsent=sum(one.unsent for one in findings),
            unconfirmed=sum(one.unconfirmed for one in findings),
            contradictions=sum(one.contradictions for one in findings),
        )

    @property
    def waiting(self) -> int:
        """How many have no outcome."""
        return self.unsent + self.unconfirmed
