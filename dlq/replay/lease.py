"""The lease of a plan: one sender at a time, fenced by an epoch, timed by the database."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, literal_column, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.audit import Audit, Warrant
from holdfast.dlq.closing import SYSTEM
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.state import NotNow, PlanState
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine

_SQLITE_EPOCH = 2440587.5  # the Julian day on which POSIX time begins
_DAY = 86400.0
_AUDITED = {PlanState.STOPPED: "replay.stop", PlanState.DONE: "replay.done"}


class Fenced(StaleDelivery):
    """Another sender has taken the plan over: this one must send and write no more."""


class TakenPlan(NotNow):
    """A sender that is alive holds the plan."""


def database_seconds(dialect: str) -> ColumnElement[Any]:
    """Return POSIX seconds by the clock of the database."""
    match dialect:
        case "postgresql":
            return func.extract("epoch", func.clock_timestamp())
        case "mysql" | "mariadb":
            # In UTC: a local clock shows an hour twice when summer time ends.
            utc = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))"
            return literal_column(utc) / 1e6
        case _:
            return (func.julianday("now") - _SQLITE_EPOCH) * _DAY


@dataclass(frozen=True, slots=True)
class Lease:
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
    ) -> Lease:
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
        until = database_seconds(db.dialect.name) + self.seconds
        own = (plan.c.id == self.plan_id) & (plan.c.epoch == self.epoch)
        where = own & plan.c.state.in_(states) if states else own
        if db.execute(update(plan).where(where).values(until=until, **values)).rowcount == 1:
            self._record(db, values)
            return True
        if db.execute(select(plan.c.epoch).where(own)).scalar() is None:
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
        warrant = Warrant(actor=SYSTEM, reason=why)
        Audit(clock=self.clock).append(db, warrant, action, f"plan {self.plan_id}", detail)

    def release(self) -> None:
        """Give the plan back, so that the next sender need not wait."""
        own = (plan.c.id == self.plan_id) & (plan.c.epoch == self.epoch)
        committed(
            self.engine,
            lambda db: db.execute(update(plan).where(own).values(owner=None, until=0)).rowcount,
            clock=self.clock,
        )


def _taken(
    db: Connection, plan_id: str, owner: str, seconds: float
) -> tuple[int | None, str | None]:
    now = database_seconds(db.dialect.name)
    free = or_(plan.c.owner.is_(None), plan.c.until < now)
    taken = db.execute(
        update(plan)
        .where(plan.c.id == plan_id, free)
        .values(owner=owner, epoch=plan.c.epoch + 1, until=now + seconds)
    ).rowcount
    row = db.execute(select(plan.c.epoch, plan.c.owner).where(plan.c.id == plan_id)).one()
    return (row.epoch, None) if taken else (None, row.owner)
