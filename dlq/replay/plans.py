"""The plans of a store, and what operators do to them; each act is audited."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut
from holdfast.dlq.audit import Audit
from holdfast.dlq.replay.approval import check_approver
from holdfast.dlq.replay.lease import Lease, database_seconds
from holdfast.dlq.replay.manifest import digest
from holdfast.dlq.replay.plan import Plan
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.state import (
    ACTIVE,
    ENDED,
    WAITING,
    ItemState,
    NotNow,
    PlanState,
    check_move,
)
from holdfast.dlq.replay.steps import stage
from holdfast.dlq.replay.tallying import again, tally
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.plan import Tally
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

    def approve(self, found: Plan, warrant: Warrant, *, shared_account: bool = False) -> Plan:
        """Let a large plan go; not by the person who made it, nor from the same account.

        With *shared_account*, which the audit keeps, several people work under one account.
        """

        def work(db: Connection) -> None:
            check_approver(db, found, warrant, shared_account=shared_account)
            values = {
                "approved_by": cut(warrant.actor),
                "approved_at": self._clock.now().timestamp(),
            }
            db.execute(update(plan).where(plan.c.id == found.id).values(**values))
            detail = {"hash": found.hash, "shared_account": shared_account}
            self._record(db, found, warrant, "replay.approve", detail)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def resume(self, found: Plan, warrant: Warrant, *, rate: Rate | None = None) -> Plan:
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
        lease = Lease.take(self._engine, found.id, clock=self._clock)
        try:
            return self._resumed(self.find(found.id), warrant, rate)
        finally:
            lease.release()

    def slow(self, found: Plan, warrant: Warrant, rate: Rate) -> Plan:
        """Send *found* at most at *rate* from now on; a sender that is at work follows."""
        if found.state in ENDED:
            raise NotNow(f"plan {found.short} is {found.state}: nothing is left to send")

        def work(db: Connection) -> None:
            db.execute(update(plan).where(plan.c.id == found.id).values(rate=rate.per_second))
            self._record(db, found, warrant, "replay.rate", {"from": str(found.rate),
                                                             "to": str(rate)})  # fmt: skip

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def _resumed(self, found: Plan, warrant: Warrant, rate: Rate | None) -> Plan:
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
        return self._moved(found, wanted, warrant, "replay.resume", values)

    def abort(self, found: Plan, warrant: Warrant) -> Plan:
        """End *found*; what was not sent is free for other plans.

        What was, and has no outcome yet, is on its way (`on_their_way`): consumers that use
        this database do not handle it when it comes, and what they do not know stays pending.
        """

        def values(db: Connection) -> dict[str, Any]:
            db.execute(
                update(item)
                .where(item.c.plan_id == found.id, item.c.state.in_(WAITING))
                .values(live=None)
            )
            return {"ended_at": self._clock.now().timestamp()}

        return self._moved(found, PlanState.ABORTED, warrant, "replay.abort", values)

    def on_their_way(self, found: Plan) -> int:
        """Return how many messages of *found* were sent and have no outcome."""
        counts = self.tally(found)
        return counts[ItemState.SENT] + counts[ItemState.UNKNOWN]

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
            detail = {"from": row.state, "sent": found.sent}
            if "forgiven" in values:
                detail["forgiven"] = values["forgiven"]
            self._record(db, found, warrant, action, detail)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.id)

    def _record(
        self, db: Connection, found: Plan, warrant: Warrant, action: str, detail: dict[str, Any]
    ) -> None:
        self._audit.append(db, warrant, action, f"plan {found.id}", detail)


_WAITING_STATES = (PlanState.DRAFT, PlanState.PAUSED, PlanState.STOPPED)
