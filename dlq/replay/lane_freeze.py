"""Freezing a plan that many claim at once, each the messages of one lane.

One transaction cannot hold millions of messages. So the plan is there first, as `freezing`: it
sends nothing, and an operator sees it and may abort it. Each lane claims its messages in short
transactions and marks how far it is; one that is begun again goes on from its mark. Only when
all are claimed the plan becomes a draft, with the hash over all of its lanes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit
from holdfast.db.text import cut, plain
from holdfast.db.transactions import committed
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.lanes import LaneClaim, LaneMark, LaneRange, divided, marks_of
from holdfast.dlq.replay.lease import PlanLease
from holdfast.dlq.replay.plan import NotNow, PlanState, ReplayPlan
from holdfast.dlq.replay.plan_freeze import take_from_triage
from holdfast.dlq.replay.progress import plan_row
from holdfast.dlq.replay.schema import item, lane, plan
from holdfast.dlq.replay.selection import digest
from holdfast.dlq.store.closing import SYSTEM, close
from holdfast.dlq.store.rows import PARKED, PENDING
from holdfast.dlq.store.schema import message
from holdfast.errors import DependencyDown
from holdfast.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.replay.plan import ReplayOptions
    from holdfast.dlq.replay.selection import Selection

ROWS = 1000
"""Messages that are claimed in one transaction."""
_RIVALS = 5
_BEHIND = "an earlier message of its key is claimed by another plan ({})"
_TAKEN = "plan {} has claimed it meanwhile"
_CLOSED = "it is {} meanwhile: there is nothing to send"


class PlannedLetter(NamedTuple):
    """One message of a lane as the survey has judged it."""

    dlq_id: str
    seq: int
    key_hash: str
    fingerprint: str | None
    state: str
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSizes:
    """How many messages each lane has: of the canary, of the rest, and set aside."""

    canary: tuple[int, ...]
    rest: tuple[int, ...]
    aside: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many are to be sent."""
        return sum(self.canary) + sum(self.rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is known of a plan before its messages are claimed."""

    selection: Selection
    terms: ReplayOptions
    operator: Operator
    high_water: int
    sizes: LaneSizes
    fingerprints: tuple[str, ...]
    aside: Mapping[str, int] = field(default_factory=dict)
    """How many are set aside as what, for the audit."""


def begin(engine: Engine, draft: Draft, *, clock: Clock = SYSTEM_CLOCK) -> PlanLease:
    """Write the plan down as freezing, with its empty lanes; return the lease on it."""
    sizes, terms, now = draft.sizes, draft.terms, clock.now().timestamp()
    row: dict[str, Any] = {
        "id": new_id(),
        "state": PlanState.FREEZING,
        "created_at": now,
        "created_by": cut(draft.operator.actor),
        "reason": plain(draft.operator.reason),
        "total": sizes.total,
        "hash": "",
        "high_water": draft.high_water,
        "selection": msgspec.json.encode(draft.selection.described()).decode(),
        "policy": msgspec.json.encode(terms.policy).decode(),
        "rate": terms.rate.per_second,
        "target": terms.to_topic,
        "fingerprints": msgspec.json.encode(sorted(draft.fingerprints)).decode(),
        "transform": terms.transform,
        "approval": int(sizes.total > terms.approve_above),
        "sent": 0,
        "forgiven": 0,
        "epoch": 0,
        "until": 0.0,
        "lanes": len(sizes.rest),
        **dict.fromkeys(("approved_by", "approved_at", "stopped_because", "owner", "ended_at")),
    }
    ranges = divided(terms.policy, sizes.canary, sizes.rest, sizes.aside)

    def work(db: Connection) -> None:
        db.execute(insert(plan), row)
        for start in range(0, len(ranges), ROWS):
            db.execute(
                insert(lane), [_lane_row(row["id"], one) for one in ranges[start : start + ROWS]]
            )

    committed(engine, work, clock=clock)
    return PlanLease.take(engine, row["id"], clock=clock)


def _lane_row(plan_id: str, one: LaneRange) -> dict[str, Any]:
    return {
        "plan_id": plan_id,
        "stage": one.stage,
        "lane": one.lane,
        "start": one.start,
        "beyond": one.beyond,
        "claimed": one.start,
        "sent": one.start,
        "epoch": 0,
        "attempt": 0,
        "until": 0.0,
    }


class LaneHash(NamedTuple):
    """The hash over the ids of one lane in one stage."""

    stage: int
    lane: int
    hash: str


def claim_lane(claim: LaneClaim, letters: Iterable[PlannedLetter]) -> list[LaneHash]:
    """Claim the *letters* of a lane, all of them in the order of their numbers; return the hashes.

    What was claimed by an earlier attempt is not claimed again. What another plan was quicker to
    claim, or somebody has closed meanwhile, stays in the plan and is set aside, with what follows
    of its key where the order demands it.
    """
    with claim.engine.connect() as db:
        marks = marks_of(db, claim.plan_id, claim.lane)
        found = claim.check_plan(db)
        blocked = None if found.policy.commutative else _blocked(db, found, marks)
    hashes, rows = [], iter(letters)
    for mark in marks:
        ids, count = hashlib.sha256(), 0
        for start in range(mark.start, mark.beyond, ROWS):
            some = list(islice(rows, min(ROWS, mark.beyond - start)))
            for letter in some:
                ids.update(f"{letter.dlq_id}\n".encode())
            count += len(some)
            if start + len(some) > mark.claimed:
                _claim_some(claim, mark.stage, start, some, blocked)
        if count != mark.beyond - mark.start:
            raise NotNow(
                f"lane {claim.lane} of plan {claim.plan_id[-8:]} has {count} messages in stage "
                f"{mark.stage}, not {mark.beyond - mark.start}: make the plan again"
            )
        hashes.append(LaneHash(mark.stage, claim.lane, ids.hexdigest()))
    claim.release()
    return hashes


def _blocked(db: Connection, found: ReplayPlan, marks: Sequence[LaneMark]) -> dict[str, str]:
    """Return the keys of which an earlier attempt found a message taken, and which one."""
    lost: dict[str, str] = {}
    for mark in marks:
        held = select(item.c.key_hash, item.c.dlq_id).where(
            item.c.plan_id == found.id,
            item.c.state == ItemState.HELD,
            item.c.position >= mark.start,
            item.c.position < min(mark.claimed, found.total),
        )
        for key, dlq_id in db.execute(held.order_by(item.c.position)):
            lost.setdefault(key, dlq_id)
    return lost


def _claim_some(
    claim: LaneClaim,
    stage: int,
    start: int,
    some: Sequence[PlannedLetter],
    blocked: dict[str, str] | None,
) -> None:
    """Claim *some* in one transaction, in which their lane is marked."""

    def work(db: Connection) -> dict[str, str]:
        known = {} if blocked is None else dict(blocked)
        claim.write(db, stage, claimed=start + len(some))
        claim.check_plan(db)
        _insert(db, claim, start, some, known)
        return known

    for attempt in range(1, _RIVALS + 1):
        try:
            known = committed(claim.engine, work, clock=claim.clock)
        except DependencyDown as error:
            # Another plan was quicker to claim one of them: look again at whose they are.
            if attempt == _RIVALS or not isinstance(error.__cause__, IntegrityError):
                raise
        else:
            if blocked is not None:
                blocked.update(known)
            return


def _insert(
    db: Connection,
    claim: LaneClaim,
    start: int,
    some: Sequence[PlannedLetter],
    blocked: dict[str, str],
) -> None:
    now = claim.clock.now().timestamp()
    wanted = sorted(one.dlq_id for one in some if one.state == ItemState.CLAIMED)
    letters = {
        row.dlq_id: row
        for row in db.execute(
            select(message.c.dlq_id, message.c.state, message.c.due_at)
            .where(message.c.dlq_id.in_(wanted))
            .order_by(message.c.dlq_id)
            .with_for_update()
        )
    }
    live = select(item.c.live, item.c.plan_id).where(item.c.live.in_(wanted))
    taken = {row.live: row.plan_id for row in db.execute(live)}
    rows = []
    for number, one in enumerate(some, start):
        state, note = one.state, one.note
        if state == ItemState.CLAIMED:
            kept = letters.get(one.dlq_id)
            if one.dlq_id in taken:
                state, note = ItemState.HELD, _TAKEN.format(taken[one.dlq_id][-8:])
                blocked.setdefault(one.key_hash, one.dlq_id)
            elif kept is None or kept.state != PENDING:
                words = "gone" if kept is None else kept.state
                state, note = ItemState.SKIPPED, _CLOSED.format(words)
            elif one.key_hash in blocked:
                state, note = ItemState.HELD, _BEHIND.format(blocked[one.key_hash])
        rows.append(_item(claim.plan_id, number, one, state, note, now))
    db.execute(insert(item), rows)
    claimed = (row["live"] for row in rows if row["live"] is not None)
    take_from_triage(db, sorted(i for i in claimed if letters[i].due_at is not None))
    parked = [one.dlq_id for one in some if one.state == ItemState.PARKED]
    if parked:
        cap = plan_row(db, claim.plan_id).policy.replay_cap
        reason = f"replayed {cap} times or more"
        close(db, parked, PARKED, actor=SYSTEM, reason=reason, clock=claim.clock)


def _item(
    plan_id: str, number: int, one: PlannedLetter, state: str, note: str | None, now: float
) -> dict[str, Any]:
    is_claimed = state == ItemState.CLAIMED
    return {
        "plan_id": plan_id,
        "position": number,
        "dlq_id": one.dlq_id,
        "live": one.dlq_id if is_claimed else None,
        "state": state,
        "key_hash": one.key_hash,
        "fingerprint": one.fingerprint,
        "again": None,
        "note": note,
        "settled_at": None if is_claimed else now,
        "seq": one.seq,
    }


def finish(lease: PlanLease, draft: Draft, hashes: Sequence[LaneHash]) -> ReplayPlan:
    """Make a draft of the plan whose lanes have claimed all of their messages."""

    def work(db: Connection) -> ReplayPlan:
        marks = marks_of(db, lease.plan_id)
        by_lane = {(one.stage, one.lane): one.hash for one in hashes}
        open_ = [one for one in marks if one.claimed < one.beyond]
        if open_ or len(by_lane) != len(marks):
            raise NotNow(f"plan {lease.plan_id[-8:]} is not claimed whole: make it again")
        ordered = sorted(marks, key=lambda one: (one.start, one.beyond, one.stage, one.lane))
        whole = digest(by_lane[one.stage, one.lane] for one in ordered)
        values = {"state": PlanState.DRAFT, "hash": whole}
        if not lease.mark(db, states=(PlanState.FREEZING,), **values):
            raise NotNow(f"plan {lease.plan_id[-8:]} was aborted while it was made")
        detail = {"total": draft.sizes.total, "hash": whole, "aside": dict(draft.aside),
                  "selection": draft.selection.described(),
                  "lanes": len(draft.sizes.rest)}  # fmt: skip
        audit = Audit(clock=lease.clock)
        audit.append(db, draft.operator, "replay.plan", f"plan {lease.plan_id}", detail)
        return plan_row(db, lease.plan_id)

    made = committed(lease.engine, work, clock=lease.clock)
    lease.release()
    return made
