"""Telling a human: each saga that is parked or past its deadline is told once, at least.

So is a reply that came after its saga had ended, as far as this process lives to tell it: it is
in the history of the saga in any case.

The hooks are those of the dead letters: a webhook, or a command that is run without a shell.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, literal_column, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.engine import reading
from holdfast.db.transactions import transact
from holdfast.errors import NotFound
from holdfast.sagas.operations import SagaDetails, SagaOperations
from holdfast.sagas.schema import saga

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

    from holdfast.dlq.alerts import Hook
    from holdfast.sagas.states import Answered
    from holdfast.sagas.store import StoredSaga

log = logging.getLogger("holdfast.sagas")

_CLAIM_SECONDS = 120.0
_AT_ONCE = 100
_MOST_LATE = 1000


class SagaAlerts:
    """Tells hooks about sagas that need a person; what one does about them is in the alert.

    A saga is claimed for two minutes while it is told, so several processes do not all tell it;
    who dies in between leaves it to the next. If a hook fails, it is told again.
    """

    def __init__(
        self, engine: Engine, hooks: Sequence[Hook], *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._clock = clock
        self._operations = SagaOperations(engine, clock=clock)
        self._late: deque[dict[str, Any]] = deque(maxlen=_MOST_LATE)

    def came_late(self, row: StoredSaga, event: Answered) -> None:
        """Note a reply to a saga that has ended; the next `run_once` tells it.

        What the participant did may stand, though the saga was undone: somebody has to look.
        """
        self._late.append(
            {
                "alert": "SagaLateReply", "saga": row.type, "version": row.version,
                "key": row.key, "id": row.id, "status": row.status, "step": event.step,
                "direction": event.direction.value, "attempt": event.attempt,
                "answer": event.answer.value, "correlation_id": row.correlation_id,
                "next": [f"holdfast saga show {row.id}"],
            }
        )  # fmt: skip

    def _tell_late(self) -> None:
        while self._late:
            alert = self._late[0]
            try:
                for hook in self._hooks:
                    hook.tell(alert)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told again
                log.warning("a late reply to saga %s is told again later: %s", alert["id"], error)
                return
            self._late.popleft()

    def run_once(self) -> int:
        """Tell what is to be told now; return how many sagas were told to every hook."""
        self._tell_late()
        with reading(self._engine).connect() as db:
            # One by one: for both at once a database looks at every saga there ever was.
            found: dict[str, None] = {}
            for needs_somebody in (_is_parked(), _is_overdue()):
                wanted = select(saga.c.id).where(needs_somebody, _is_free())
                wanted = wanted.order_by(saga.c.id).limit(_AT_ONCE)
                found |= dict.fromkeys(db.execute(wanted).scalars())
        return sum(1 for one in found if self._claim(one) and self._tell(one))

    def _claim(self, saga_id: str) -> bool:
        # Below 0 it is a claim, and says until when.
        return self._mark(saga_id, -(database_now() + _CLAIM_SECONDS), _is_untold())

    def _tell(self, saga_id: str) -> bool:
        try:
            alert = alert_of(self._operations.show(saga_id))
            for hook in self._hooks:
                hook.tell(alert)
        except NotFound:
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told again
            log.warning("saga %s is told again later: %s", saga_id, error)
            self._mark(saga_id, None)
            return False
        return self._mark(saga_id, database_now())

    def _mark(self, saga_id: str, value: Any, *conditions: Any) -> bool:
        changed = update(saga).where(saga.c.id == saga_id, *conditions).values(alerted_at=value)
        return transact(
            self._engine, lambda db: db.execute(changed).rowcount == 1, clock=self._clock
        )


def alert_of(found: SagaDetails) -> dict[str, Any]:
    """Return what hooks are told: everything needed to decide, never the state of the saga."""
    summary = found.summary
    failed = [one for one in found.attempts if one.error]
    return {
        "alert": "SagaParked" if found.parked else "SagaOverdue",
        "saga": summary.type,
        "version": summary.version,
        "key": summary.key,
        "id": summary.id,
        "status": summary.status,
        "reason": summary.reason,
        "parked": list(found.parked),
        "last_error": failed[-1].error if failed else None,
        "age_seconds": summary.age_seconds,
        "correlation_id": found.correlation_id,
        "next": [
            f"holdfast saga show {summary.id}",
            *(
                f"holdfast saga retry {summary.id} --step {name} --reason …"
                for name in found.parked
            ),
        ],
    }


def _is_untold() -> Any:
    return and_(or_(_is_parked(), _is_overdue()), _is_free())


def _is_parked() -> Any:
    # A constant: of a parameter PostgreSQL does not know that it means few of the rows.
    return saga.c.status == literal_column("'parked'")


def _is_overdue() -> Any:
    return and_(saga.c.deadline_at < database_now(), saga.c.active_key.is_not(None))


def _is_free() -> Any:
    told = saga.c.alerted_at
    return or_(told.is_(None), and_(told < 0, told > -database_now()))
