"""Automatic retries: what triage has put down is sent when it is due, round after round."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sqlalchemy import select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.transactions import committed
from holdfast.dlq.replay.item_state import WAITING
from holdfast.dlq.replay.plan import ACTIVE, EndingKind, NotNow, PlanState, ReplayOptions, RunResult
from holdfast.dlq.replay.plan_freeze import freeze
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.sender import Sender
from holdfast.dlq.replay.survey import AlreadyClaimed, NothingToReplay
from holdfast.dlq.store.schema import message

if TYPE_CHECKING:
    import threading

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.sender import Pace
    from holdfast.ports import Broker

log = logging.getLogger("holdfast.dlq.replay")
_LATER = 60.0  # seconds until what a stopped plan did not send is due again
_OPEN = ACTIVE | {PlanState.DRAFT, PlanState.STOPPED}
_MOST_PLANS = 100


class Retrying:
    """Makes and sends a plan of what is due, in each round; a crash leaves it to the next one.

    A plan that a stop condition ends gives what it did not send back to triage: nobody is
    needed for the next try, and none of its tries is used up. One that an operator has paused
    is left to the operator.
    """

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        operator: Operator,
        *,
        selection: Selection | None = None,
        terms: ReplayOptions | None = None,
        vault: Vault | None = None,
        stopping: threading.Event | None = None,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._operator = operator
        self._selection = Selection(due=True) if selection is None else selection
        self._terms = ReplayOptions() if terms is None else terms
        self._plans = Plans(engine, clock=clock)
        self._clock = clock
        self._stopping = stopping
        self._sender = Sender(
            engine, broker, pace=pace, clock=clock, vault=vault, stopping=stopping
        )

    def round(self) -> list[RunResult]:
        """Send what an earlier round has left, then what is due; return how each plan ended."""
        endings = [self._sent(plan) for plan in self._left() if not self._is_over()]
        if self._is_over():
            return endings
        try:
            made = freeze(
                self._engine, self._selection, self._terms, self._operator, clock=self._clock
            ).plan
        except (NothingToReplay, AlreadyClaimed):
            return endings
        if made.waits_for_approval:
            log.warning("plan %s of %d retries waits for approval", made.short, made.total)
            return endings
        return [*endings, self._sent(made)]

    def _is_over(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def _left(self) -> list[ReplayPlan]:
        """Return the plans of earlier rounds that nobody sends now, and that have work left."""
        mine = []
        for found in self._plans.latest(limit=_MOST_PLANS, active=True):
            ours = found.created_by == self._operator.actor and found.selection.get("due")
            if not ours or found.state not in _OPEN or found.waits_for_approval:
                continue
            plan = self._plans.ended(found, self._operator)
            whole = plan.sent >= plan.total and plan.state is not PlanState.DRAFT
            if plan.state in _OPEN and not whole and not self._plans.is_sent_now(plan):
                mine.append(plan)
        return mine

    def _sent(self, plan: ReplayPlan) -> RunResult:
        if plan.state is PlanState.STOPPED:
            reason = plan.stopped_because or "stopped"
            ending = RunResult(EndingKind.STOPPED, plan.id, reason)
        else:
            try:
                ending = self._sender.run(plan.id)
            except NotNow as error:
                return RunResult(EndingKind.PAUSED, plan.id, str(error))
        if ending.kind is EndingKind.STOPPED:
            self._give_back(plan)
        return ending

    def _give_back(self, plan: ReplayPlan) -> None:
        """Abort *plan*; what it did not send is due again soon, with all the tries it had."""
        found = self._plans.find(plan.id)
        due = self._clock.now().timestamp() + _LATER

        def work(db: Connection) -> int:
            unsent = select(item.c.dlq_id).where(
                item.c.plan_id == found.id,
                item.c.position >= found.sent,
                item.c.state.in_(WAITING),
            )
            values = {"due_at": due, "retries": message.c.retries - 1}
            ids = list(db.execute(unsent).scalars())
            db.execute(
                update(message)
                .where(message.c.dlq_id.in_(ids), message.c.retries > 0)
                .values(**values)
            )
            return len(ids)

        count = committed(self._engine, work, clock=self._clock)
        self._plans.abort(found, self._operator)
        log.warning("plan %s stopped (%s): %d messages are due again in %g s", found.short,
                    found.stopped_because, count, _LATER)  # fmt: skip
