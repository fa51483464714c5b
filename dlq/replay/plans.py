"""The plans of a store, and what operators do to them; each act is audited."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.audit import Audit
from holdfast.dlq.replay.lease import database_seconds
from holdfast.dlq.replay.manifest import digest
from holdfast.dlq.replay.plan import Plan, Tally
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.state import ACTIVE, WAITING, ItemState, NotNow, PlanState, check_move
from holdfast.dlq.replay.steps import stage
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.rate import Rate


_SHORT_FROM = 29  # of the 36 characters of an id: `Plan.short`


class Plans:
    """Finds plans and changes their state; sending is the sender's."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def find(self, text: str) -> Plan:
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
        return Plan.of(rows[0])

    def latest(self, *, limit: int = 20, active: bool = False) -> list[Plan]:
        """Return the newest plans."""
        found = select(plan).order_by(plan.c.created_at.desc(), plan.c.id.desc()).limit(limit)
        if active:
            open_ = [state.value for state in (*ACTIVE, *_WAITING_STATES)]
            found = found.where(plan.c.state.in_(open_))
        with self._engine.connect() as db:
            return [Plan.of(row) for row in db.execute(found).mappings()]

    def is_sent_now(self, found: Plan) -> bool:
        """Whether a sender that is alive has *found*, by the clock of the database."""
        query = select(plan.c.until > database_seconds(self._engine.dialect.name)).where(
            plan.c.id == found.id, plan.c.owner.is_not(None)
        )
        with self._engine.connect() as db:
            return bool(db.execute(query).scalar())

    def ended(self, found: Plan, warrant: Warrant) -> Plan:
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
                found, PlanState.DONE, warrant, "replay.done", lambda _db: {"ended_at": at}
            )
        return found

    def tally(self, found: Plan) -> Tally:
        """Return what became of the items; those sent and without an outcome count as sent."""
        with self._engine.connect() as db:
            return tally(db, found)

    def pause(self, found: Plan, warrant: Warrant) -> Plan:
        """Let its sender end after the batch in hand."""
        return self._moved(found, PlanState.PAUSED, warrant, "replay.pause")

    def approve(self, found: Plan, warrant: Warrant) -> Plan:
        """Let a large plan go; not by the person who made it."""
        if not found.approval:
            raise NotNow(f"plan {found.short} needs no approval")
        if found.approved_by is not None:
            raise NotNow(f"plan {found.short} was approved by {found.approved_by}")
        if warrant.actor.strip().casefold() == found.created_by.strip().casefold():
            raise NotNow(
                f"{found.created_by} made plan {found.short}: somebody else must approve it"
            )

        def work(db: Connection) -> None:
            values = {"approved_by": warrant.actor, "approved_at": self._clock.now().timestamp()}
            db.execute(update(plan).where(plan.c.id == found.id).values(**values))
            self._record(db, found, warrant, "replay.approve", {"hash": found.hash})

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def resume(self, found: Plan, warrant: Warrant, *, rate: Rate | None = None) -> Plan:
        """Make *found* ready to be sent on, perhaps at another *rate*.

        What failed so far is known and forgiven; after a failed canary the next messages
        become a canary of the same size. A plan whose sender died goes on as it is.
        """
        if found.waits_for_approval:
            raise NotNow(
                f"plan {found.short} of {found.total:,} messages waits for approval: "
                f"holdfast dlq plans approve {found.short}, not by {found.created_by}"
            )

        def values(db: Connection) -> dict[str, Any]:
            faster = {} if rate is None else {"rate": rate.per_second}
            if found.state in ACTIVE:
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

        wanted = found.state  # its sender died, or runs: the lease will tell
        if found.state not in ACTIVE:
            wanted = stage(found.sent, found.total, found.policy)
        return self._moved(found, wanted, warrant, "replay.resume", values)

    def abort(self, found: Plan, warrant: Warrant) -> Plan:
        """End *found*; what was not sent is free for other plans."""

        def values(db: Connection) -> dict[str, Any]:
            db.execute(
                update(item)
                .where(item.c.plan_id == found.id, item.c.state.in_(WAITING))
                .values(live=None)
            )
            return {"ended_at": self._clock.now().timestamp()}

        return self._moved(found, PlanState.ABORTED, warrant, "replay.abort", values)

    def overdue(self, found: Plan, warrant: Warrant) -> int:
        """Mark what was sent and never confirmed as unknown; return how many are."""

        def work(db: Connection) -> int:
            waiting = (
                (item.c.plan_id == found.id)
                & (item.c.position < found.sent)
                & item.c.state.in_(WAITING)
            )
            count = db.execute(update(item).where(waiting).values(state=ItemState.UNKNOWN)).rowcount
            if count:
                self._record(db, found, warrant, "replay.unknown", {"count": count})
            return count

        return committed(self._engine, work, clock=self._clock)

    def manifest_hash(self, found: Plan) -> str:
        """Return the hash over the items as they are now; it must be the plan's."""
        ids = select(item.c.dlq_id).where(item.c.plan_id == found.id).order_by(item.c.position)
        with self._engine.connect() as db:
            return digest(db.execute(ids.execution_options(yield_per=5000)).scalars())

    def _moved(
        self,
        found: Plan,
        wanted: PlanState,
        warrant: Warrant,
        action: str,
        more: Callable[[Connection], dict[str, Any]] | None = None,
    ) -> Plan:
        def work(db: Connection) -> None:
            row = db.execute(
                select(plan.c.state).where(plan.c.id == found.id).with_for_update()
            ).one()
            if row.state != wanted or wanted not in ACTIVE:
                check_move(PlanState(row.state), wanted)
            values = {} if more is None else more(db)
            db.execute(update(plan).where(plan.c.id == found.id).values(state=wanted, **values))
            self._record(db, found, warrant, action, {"from": row.state, "sent": found.sent})

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def _record(
        self, db: Connection, found: Plan, warrant: Warrant, action: str, detail: dict[str, Any]
    ) -> None:
        self._audit.append(db, warrant, action, f"plan {found.id}", detail)


def tally(db: Connection, found: Plan) -> Tally:
    """Count the items of *found* by state."""
    below = item.c.position < found.sent
    by_state = (
        select(item.c.state, below.label("below"), func.count())
        .where(item.c.plan_id == found.id)
        .group_by(item.c.state, below)
    )
    counts: dict[ItemState, int] = {}
    for state, is_sent, count in db.execute(by_state):
        shown = ItemState(state)
        if shown is ItemState.CLAIMED and is_sent:
            shown = ItemState.SENT
        counts[shown] = counts.get(shown, 0) + count
    return Tally(total=found.total, counts=counts)


def again(plan_id: str) -> Any:
    """Return the query for the kinds of failure that came back."""
    return (
        select(item.c.again)
        .where(item.c.plan_id == plan_id, item.c.state == ItemState.FAILED_AGAIN)
        .distinct()
    )


_WAITING_STATES = (PlanState.DRAFT, PlanState.PAUSED, PlanState.STOPPED)
