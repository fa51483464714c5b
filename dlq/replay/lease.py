"""The lease of a plan: one sender at a time, fenced by an epoch, timed by the database."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, Operator
from holdfast.db.lease import LeaseColumns
from holdfast.db.transactions import committed
from holdfast.dlq.replay.plan import NotNow, PlanState
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.store.closing import SYSTEM
from holdfast.errors import ConfigurationError, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy.engine import Connection, Engine

PLAN_LEASE = LeaseColumns(owner=plan.c.owner, until=plan.c.until, epoch=plan.c.epoch)
"""Who sends a plan, and until when."""
_AUDITED = {PlanState.STOPPED: "replay.stop", PlanState.DONE: "replay.done"}


class Fenced(StaleDelivery):
    """Another sender has taken the plan over: this one must send and write no more."""


class TakenPlan(NotNow):
    """A sender that is alive holds the plan."""


@dataclass(frozen=True, slots=True)
class PlanLease:
    """The right to send plan *plan_id*, for as long as nobody has a higher epoch."""

    engine: Engine
    plan_id: str
    owner: str
    epoch: int
    seconds: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def take(
        cls, engine: Engine, plan_id: str, *, seconds: float = 5.0, clock: Clock = SYSTEM_CLOCK
    ) -> PlanLease:
        """Take the plan unless a living sender has it; waits out the lease of a dead one.

        A sender that lives renews, so the lease is asked for again until twice its length
        has passed.
        """
        if seconds <= 0:
            raise ConfigurationError(f"a lease of {seconds:g} s: use more than 0")
        owner = f"{socket.gethostname()}:{os.getpid()}"
        patience = clock.monotonic() + seconds * 2
        while True:
            epoch, holder = committed(
                engine, lambda db: _taken(db, plan_id, owner, seconds), clock=clock
            )
            if epoch is not None:
                return cls(engine, plan_id, owner, epoch, seconds, clock)
            if clock.monotonic() > patience:
                raise TakenPlan(
                    f"plan {plan_id[-8:]} is being sent by {holder}: watch it with  "
                    f"holdfast dlq plans show {plan_id[-8:]}"
                )
            clock.sleep(min(0.25, seconds / 4))

    def mark(self, db: Connection, *, states: Collection[PlanState] = (), **values: Any) -> bool:
        """Write *values* to the plan and renew; False when it is in none of *states* any more.

        Raises `Fenced` when another sender has taken over.
        """
        row = plan.c.id == self.plan_id
        wanted = and_(row, plan.c.state.in_(states)) if states else row
        if PLAN_LEASE.renew(db, wanted, epoch=self.epoch, seconds=self.seconds, **values):
            self._record(db, values)
            return True
        if not PLAN_LEASE.verify(db, row, epoch=self.epoch):
            raise Fenced(f"another sender has taken over plan {self.plan_id[-8:]}")
        return False

    def _record(self, db: Connection, values: Mapping[str, Any]) -> None:
        """Write down that the plan stopped or ended, and how: the plan itself is pruned one day."""
        action = _AUDITED.get(values.get("state", ""))
        if action is None:
            return
        counts = select(item.c.state, func.count()).where(item.c.plan_id == self.plan_id)
        detail = {state: count for state, count in db.execute(counts.group_by(item.c.state))}  # noqa: C416 - Rows
        why = values.get("stopped_because") or "every message has an outcome"
        operator = Operator(actor=SYSTEM, reason=why)
        Audit(clock=self.clock).append(db, operator, action, f"plan {self.plan_id}", detail)

    def release(self) -> None:
        """Give the plan back, so that the next sender need not wait."""
        row = plan.c.id == self.plan_id
        committed(
            self.engine,
            lambda db: PLAN_LEASE.release(db, row, epoch=self.epoch),
            clock=self.clock,
        )


def _taken(
    db: Connection, plan_id: str, owner: str, seconds: float
) -> tuple[int | None, str | None]:
    row = plan.c.id == plan_id
    taken = PLAN_LEASE.take(db, row, owner=owner, seconds=seconds)
    found = PLAN_LEASE.look(db, row)
    if found is None:
        raise ConfigurationError(f"plan {plan_id[-8:]} is not there any more")
    return (found.epoch, None) if taken else (None, found.owner)
