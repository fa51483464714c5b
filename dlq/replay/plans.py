"""The plans of a store, and what operators do to them; each act is audited.

The second pair of eyes: a large plan goes when somebody else than its maker says so.

Counting what became of a plan's items.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import and_, case, func, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit
from holdfast.db.text import cut
from holdfast.db.transactions import committed
from holdfast.dlq.replay.item_state import NOT_CLAIMED, WAITING, ItemState
from holdfast.dlq.replay.lease import PLAN_LEASE, PlanLease
from holdfast.dlq.replay.plan import (
    ACTIVE,
    ENDED,
    NotNow,
    PlanCounts,
    PlanState,
    ReplayPlan,
    check_move,
    stage,
)
from holdfast.dlq.replay.schema import item, lane, plan
from holdfast.dlq.replay.selection import digest
from holdfast.dlq.store.schema import audit, group
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.replay.plan import Rate


def check_approver(
    db: Connection, plan: ReplayPlan, operator: Operator, *, shared_account: bool = False
) -> None:
    """Raise `NotNow` unless whoever acts by *operator* may approve *plan*.

    Neither the maker's name nor the maker's account at the system may; with
    *shared_account* the names alone count.
    """
    if not plan.approval:
        raise NotNow(f"plan {plan.short} needs no approval")
    if plan.approved_by is not None:
        raise NotNow(f"plan {plan.short} was approved by {plan.approved_by}")
    if operator.actor.strip().casefold() == plan.created_by.strip().casefold():
        raise NotNow(f"{plan.created_by} made plan {plan.short}: somebody else must approve it")
    if operator.account and not shared_account and operator.account == _maker(db, plan):
        raise NotNow(
            f"plan {plan.short} was made by the account {operator.account}, which is yours: "
            "somebody else must approve it, or say --shared-account if several people work under it"
        )


def _maker(db: Connection, plan: ReplayPlan) -> str:
    """Return the account that made *plan*; empty where it was not noted."""
    made = (audit.c.action == "replay.plan") & (audit.c.subject == f"plan {plan.id}")
    detail = db.execute(select(audit.c.detail).where(made)).scalar()
    return "" if detail is None else str(msgspec.json.decode(detail).get("account", ""))


_SENT, _OPEN = 0, 1  # parts of a plan: up to its sent mark, and from there; the rest was set aside


def tally(db: Connection, found: ReplayPlan) -> PlanCounts:
    """Count the items of *found* by state.

    Claimed is what has no other state: those are counted, and the rest follows from the
    numbers, so that a plan of which nothing is confirmed yet costs nothing to look at.
    """
    if found.lanes:
        return _tally_lanes(db, found)
    part = case((item.c.position < found.sent, _SENT), (item.c.position < found.total, _OPEN))
    by_state = (
        select(item.c.state, part.label("part"), func.count())
        .where(item.c.plan_id == found.id, item.c.state.in_(NOT_CLAIMED))
        .group_by(item.c.state, part)
    )
    counts: Counter[ItemState] = Counter()
    waiting = {_SENT: found.sent, _OPEN: found.total - found.sent, None: 0}
    for state, where, count in db.execute(by_state):
        counts[ItemState(state)] += count
        waiting[where] -= count
    counts[ItemState.SENT], counts[ItemState.CLAIMED] = waiting[_SENT], waiting[_OPEN]
    return PlanCounts(total=found.total, counts=+counts, published=found.sent)


def _tally_lanes(db: Connection, found: ReplayPlan) -> PlanCounts:
    """Count as `tally` does, where each lane has a mark of its own."""
    done = func.coalesce(func.sum(lane.c.sent - lane.c.start), 0)
    published = int(db.execute(select(done).where(lane.c.plan_id == found.id)).scalar_one())
    counts: Counter[ItemState] = Counter()
    of_plan = item.c.plan_id == found.id, item.c.state.in_(NOT_CLAIMED)
    planned = (item.c.position < found.total).label("planned")
    every = select(item.c.state, planned, func.count()).where(*of_plan)
    waiting = found.total - published
    for state, is_planned, count in db.execute(every.group_by(item.c.state, "planned")):
        counts[ItemState(state)] += count
        waiting -= count if is_planned else 0
    settled = db.execute(
        select(func.count()).select_from(lane).join(item, _of_lane()).where(
            lane.c.plan_id == found.id, item.c.state.in_(NOT_CLAIMED)
        )
    ).scalar_one()  # fmt: skip
    counts[ItemState.SENT] = published - settled
    counts[ItemState.CLAIMED] = waiting + settled
    return PlanCounts(total=found.total, counts=+counts, published=published)


def _of_lane() -> ColumnElement[bool]:
    """Whether an item was published by the lane: an index finds those of each lane together."""
    return and_(
        item.c.plan_id == lane.c.plan_id,
        item.c.position >= lane.c.start,
        item.c.position < lane.c.sent,
    )


def was_published(found: ReplayPlan) -> ColumnElement[bool]:
    """Return the condition that an item of *found* was given to the broker."""
    if not found.lanes:
        return item.c.position < found.sent
    return select(lane.c.lane).where(lane.c.plan_id == found.id, _of_lane()).exists()


def again(plan_id: str) -> Any:
    """Return the query for the kinds of failure that came back."""
    return (
        select(item.c.again)
        .where(item.c.plan_id == plan_id, item.c.state == ItemState.FAILED_AGAIN)
        .distinct()
    )


_SHORT_FROM = 29  # of the 36 characters of an id: `Plan.short`


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemNote:
    """Why one message of a plan failed again or was set aside."""

    dlq_id: str
    state: str
    note: str | None
    again: str | None
    """The fingerprint of the failure, if it failed again."""
    error: str | None
    """What that kind of failure says."""


NOBODY: Final = (1 << 62) - 1
"""The attempt at a lane that no other follows: the plan has ended."""


def lane_bounds(db: Connection, plan_id: str) -> list[tuple[int, int]]:
    """Return where each lane of each stage begins and ends, in the order of their numbers."""
    bounds = select(lane.c.start, lane.c.beyond).where(lane.c.plan_id == plan_id)
    ordered = bounds.order_by(lane.c.start, lane.c.beyond, lane.c.stage, lane.c.lane)
    return [(row.start, row.beyond) for row in db.execute(ordered)]


def lane_hash(db: Connection, plan_id: str, start: int, beyond: int) -> str:
    """Return the hash over the ids of the items from *start* up to before *beyond*."""
    ids = (
        select(item.c.dlq_id)
        .where(item.c.plan_id == plan_id, item.c.position >= start, item.c.position < beyond)
        .order_by(item.c.position)
    )
    return digest(db.execute(ids.execution_options(yield_per=5000)).scalars())


class Plans:
    """Finds plans and changes their state; sending is the sender's."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def find(self, text: str) -> ReplayPlan:
        """Return the plan whose id, or the short form of it, begins or ends with *text*."""
        if not text.strip():
            raise ConfigurationError("the plan's id is empty: see  holdfast dlq plans list")
        wanted = text.strip().lower()
        match = or_(
            plan.c.id.startswith(wanted, autoescape=True),
            plan.c.id.endswith(wanted, autoescape=True),
            func.substr(plan.c.id, _SHORT_FROM).startswith(wanted, autoescape=True),
        )
        with self._engine.connect() as db:
            rows = db.execute(select(plan).where(match).limit(3)).mappings().all()
        if not rows:
            raise NotFound(f"no plan {text!r}: see  holdfast dlq plans list")
        if len(rows) > 1:
            some = ", ".join(str(row["id"]) for row in rows)
            raise ConfigurationError(f"{text!r} may mean {some}: write more of the id")
        return ReplayPlan.of(rows[0])

    def latest(self, *, limit: int = 20, active: bool = False) -> list[ReplayPlan]:
        """Return the newest plans."""
        found = select(plan).order_by(plan.c.created_at.desc(), plan.c.id.desc()).limit(limit)
        if active:
            open_ = [state.value for state in (*ACTIVE, *_WAITING_STATES)]
            found = found.where(plan.c.state.in_(open_))
        with self._engine.connect() as db:
            return [ReplayPlan.of(row) for row in db.execute(found).mappings()]

    def is_sent_now(self, found: ReplayPlan) -> bool:
        """Whether a sender that is alive has *found*, by the clock of the database."""
        sent = select(plan.c.id).where(plan.c.id == found.id, ~PLAN_LEASE.is_free())
        with self._engine.connect() as db:
            return db.execute(sent).first() is not None

    def ended(self, found: ReplayPlan, operator: Operator) -> ReplayPlan:
        """Return *found*, done if every message of it has an outcome and nobody sends it."""
        counts = self.tally(found)
        waits = any(
            counts[state] for state in (ItemState.CLAIMED, ItemState.SENT, ItemState.UNKNOWN)
        )
        if found.state in (*ACTIVE, PlanState.PAUSED, PlanState.STOPPED) and not (
            waits or self.is_sent_now(found)
        ):
            at = self._clock.now().timestamp()
            return self._moved(
                found, PlanState.DONE, operator, "replay.done", lambda _db: {"ended_at": at}
            )
        return found

    def tally(self, found: ReplayPlan) -> PlanCounts:
        """Return what became of the items; those sent and without an outcome count as sent."""
        with self._engine.connect() as db:
            return tally(db, found)

    def notes(self, found: ReplayPlan, *, limit: int = 20) -> list[ItemNote]:
        """Return what failed again or was set aside, in the order of sending, and why."""
        names = ("dlq_id", "state", "note", "again")
        # What it failed with this time: a group has the words of its kind of failure.
        words = select(func.min(group.c.title)).where(group.c.fingerprint == item.c.again)
        columns = (*(item.c[name] for name in names), words.scalar_subquery().label("error"))
        query = select(*columns).where(
            item.c.plan_id == found.id, item.c.state.in_([state.value for state in _TOLD])
        )
        with self._engine.connect() as db:
            rows = db.execute(query.order_by(item.c.position).limit(limit)).mappings()
            return [ItemNote(**row) for row in rows]

    def pause(self, found: ReplayPlan, operator: Operator) -> ReplayPlan:
        """Let its sender end after the batch in hand."""
        return self._moved(found, PlanState.PAUSED, operator, "replay.pause")

    def approve(
        self, found: ReplayPlan, operator: Operator, *, shared_account: bool = False
    ) -> ReplayPlan:
        """Let a large plan go; not by the person who made it, nor from the same account.

        With *shared_account*, which the audit keeps, several people work under one account.
        """

        def work(db: Connection) -> None:
            check_approver(db, found, operator, shared_account=shared_account)
            values = {
                "approved_by": cut(operator.actor),
                "approved_at": self._clock.now().timestamp(),
            }
            db.execute(update(plan).where(plan.c.id == found.id).values(**values))
            detail = {"hash": found.hash, "shared_account": shared_account}
            self._record(db, found, operator, "replay.approve", detail)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def resume(
        self, found: ReplayPlan, operator: Operator, *, rate: Rate | None = None
    ) -> ReplayPlan:
        """Make *found* ready to be sent on, perhaps at another *rate*; not while it is sent.

        After a stop what failed so far is known and forgiven, and after a failed canary the
        next messages become a canary of the same size. A plan that was paused, or whose
        sender died, goes on as it is: what failed since then may stop it.
        """
        if found.waits_for_approval:
            raise NotNow(
                f"plan {found.short} of {found.total:,} messages waits for approval: "
                f"holdfast dlq plans approve {found.short}, not by {found.created_by}"
            )
        if found.state in ENDED:
            raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")
        if found.state is PlanState.FREEZING:
            raise NotNow(f"plan {found.short} is being made: wait until it is frozen, or abort it")
        lease = PlanLease.take(self._engine, found.id, clock=self._clock)
        try:
            return self._resumed(self.find(found.id), operator, rate)
        finally:
            lease.release()

    def slow(self, found: ReplayPlan, operator: Operator, rate: Rate) -> ReplayPlan:
        """Send *found* at most at *rate* from now on; a sender that is at work follows."""
        if found.state in ENDED:
            raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")

        def work(db: Connection) -> None:
            db.execute(update(plan).where(plan.c.id == found.id).values(rate=rate.per_second))
            self._record(db, found, operator, "replay.rate", {"from": str(found.rate),
                                                             "to": str(rate)})  # fmt: skip

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def _resumed(self, found: ReplayPlan, operator: Operator, rate: Rate | None) -> ReplayPlan:
        def values(db: Connection) -> dict[str, Any]:
            faster = {} if rate is None else {"rate": rate.per_second}
            if found.state is not PlanState.STOPPED:
                return faster
            counts = tally(db, found)
            kinds = db.execute(again(found.id)).scalars()
            policy = found.policy
            if counts[ItemState.FAILED_AGAIN] and found.sent <= policy.canary:
                policy = replace(policy, canary=found.sent + policy.canary)
            known = sorted({*found.fingerprints, *(text for text in kinds if text)})
            return {
                "forgiven": counts[ItemState.FAILED_AGAIN],
                "policy": msgspec.json.encode(policy).decode(),
                "fingerprints": msgspec.json.encode(known).decode(),
                "stopped_because": None,
                **faster,
            }

        wanted = found.state  # its sender died
        if found.state not in ACTIVE:
            wanted = stage(found.sent, found.total, found.policy)
        return self._moved(found, wanted, operator, "replay.resume", values)

    def abort(self, found: ReplayPlan, operator: Operator) -> ReplayPlan:
        """End *found*; what was not sent is free for other plans.

        What was, and has no outcome yet, is on its way (`on_their_way`): consumers that use
        this database do not handle it when it comes, and what they do not know stays pending.
        """

        def values(db: Connection) -> dict[str, Any]:
            # Who claims or sends for a lane is fenced before anything is freed.
            db.execute(update(lane).where(lane.c.plan_id == found.id).values(attempt=NOBODY))
            db.execute(
                update(item)
                .where(item.c.plan_id == found.id, item.c.state.in_(WAITING))
                .values(live=None)
            )
            return {"ended_at": self._clock.now().timestamp()}

        return self._moved(found, PlanState.ABORTED, operator, "replay.abort", values)

    def on_their_way(self, found: ReplayPlan) -> int:
        """Return how many messages of *found* were sent and have no outcome."""
        counts = self.tally(found)
        return counts[ItemState.SENT] + counts[ItemState.UNKNOWN]

    def overdue(self, found: ReplayPlan, operator: Operator) -> int:
        """Mark what was sent and never confirmed as unknown; return how many are."""

        def work(db: Connection) -> int:
            waiting = (
                (item.c.plan_id == found.id) & was_published(found) & item.c.state.in_(WAITING)
            )
            count = db.execute(update(item).where(waiting).values(state=ItemState.UNKNOWN)).rowcount
            if count:
                self._record(db, found, operator, "replay.unknown", {"count": count})
            return count

        return committed(self._engine, work, clock=self._clock)

    def manifest_hash(self, found: ReplayPlan) -> str:
        """Return the hash over the items as they are now; it must be the plan's.

        That of a plan with lanes is over the hashes of its lanes, which many can make at once.
        """
        ids = select(item.c.dlq_id).where(item.c.plan_id == found.id).order_by(item.c.position)
        with self._engine.connect() as db:
            if not found.lanes:
                return digest(db.execute(ids.execution_options(yield_per=5000)).scalars())
            return digest(lane_hash(db, found.id, *bounds) for bounds in lane_bounds(db, found.id))

    def _moved(
        self,
        found: ReplayPlan,
        wanted: PlanState,
        operator: Operator,
        action: str,
        more: Callable[[Connection], dict[str, Any]] | None = None,
    ) -> ReplayPlan:
        def work(db: Connection) -> None:
            row = db.execute(
                select(plan.c.state).where(plan.c.id == found.id).with_for_update()
            ).one()
            if row.state != wanted or wanted not in ACTIVE:
                check_move(PlanState(row.state), wanted)
            values = {} if more is None else more(db)
            db.execute(update(plan).where(plan.c.id == found.id).values(state=wanted, **values))
            detail = {"from": row.state, "sent": found.sent}
            if "forgiven" in values:
                detail["forgiven"] = values["forgiven"]
            self._record(db, found, operator, action, detail)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def _record(
        self,
        db: Connection,
        found: ReplayPlan,
        operator: Operator,
        action: str,
        detail: dict[str, Any],
    ) -> None:
        self._audit.append(db, operator, action, f"plan {found.id}", detail)


_WAITING_STATES = (PlanState.FREEZING, PlanState.DRAFT, PlanState.PAUSED, PlanState.STOPPED)
_TOLD = (ItemState.FAILED_AGAIN, ItemState.HELD, ItemState.PARKED, ItemState.SKIPPED)
