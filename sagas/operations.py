"""What operators do about sagas: look, retry, skip, mark as done, cancel, signal.

An act is written down with who and why, and carried out by the next worker that knows the saga's
version: this needs no code of the user, so a command line can do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import ColumnElement, func, insert, literal_column, or_, select
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import SAGAS, Audit
from holdfast.db.clock import database_now
from holdfast.db.engine import reading
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, NotFound
from holdfast.sagas import store
from holdfast.sagas.schema import history, saga, step, timer
from holdfast.sagas.states import (
    CancelRequested,
    MarkedDone,
    RetryRequested,
    SagaEvent,
    Signalled,
    SkipRequested,
)
from holdfast.sagas.versions import CheckedInstances, Definitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.sagas.definition import Saga
    from holdfast.sagas.store import StoredSaga

STATUSES = ("running", "compensating", "parked", "completed", "compensated")
_ACTIVE: list[ColumnElement[Any]] = [literal_column(f"'{status}'") for status in STATUSES[:3]]
"""As constants: with parameters PostgreSQL does not see that these are few of the rows."""


class Act(StrEnum):
    """What an operator asks for, as the kind of the timer by which a worker hears of it."""

    RETRY = "ask-retry"
    SKIP = "ask-skip"
    MARK_DONE = "ask-mark-done"
    CANCEL = "ask-cancel"
    SIGNAL = "ask-signal"

    @property
    def verb(self) -> str:
        """The word of the command."""
        return self.value.removeprefix("ask-")


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaSummary:
    """One saga in a list."""

    id: str
    type: str
    version: int
    key: str
    status: str
    reason: str
    age_seconds: float
    quiet_seconds: float
    """Since it last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """One attempt at a step."""

    step: str
    direction: str
    attempt: int
    status: str
    seconds: float | None
    error: str | None
    message_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaDetails:
    """Everything about one saga that helps a human to decide."""

    summary: SagaSummary
    state: str
    correlation_id: str | None
    steps: dict[str, str]
    parked: tuple[str, ...]
    attempts: list[AttemptSummary]
    timers: list[tuple[str, str, float]]
    """Step, kind, and in how many seconds it is due."""
    history: list[tuple[float, str]]
    """Seconds ago, and what happened."""


def asked(kind: str, name: str, payload: bytes | None) -> SagaEvent | None:
    """Return the event that an operator's act stands for; None if *kind* is none."""
    match kind:
        case Act.RETRY:
            return RetryRequested(name)
        case Act.SKIP:
            return SkipRequested(name)
        case Act.MARK_DONE:
            return MarkedDone(name)
        case Act.CANCEL:
            return CancelRequested((payload or b"").decode())
        case Act.SIGNAL:
            return Signalled(name)
        case _:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SagaBacklog:
    """What has not ended, for metrics."""

    active: dict[tuple[str, str], int]
    """By saga and status."""
    overdue_by_saga: dict[str, int]
    """0 for those of which all are in time."""
    timer_lag_seconds: float

    @property
    def overdue(self) -> int:
        """How many are past their deadline."""
        return sum(self.overdue_by_saga.values())


class SagaOperations:
    """Looks at sagas and asks for what they need; every act has an actor and a reason."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(SAGAS, clock=clock)

    def list(
        self,
        *,
        status: str | None = None,
        kind: str | None = None,
        overdue: bool = False,
        after: str | None = None,
        limit: int = 100,
    ) -> Sequence[SagaSummary]:
        """Return at most *limit* sagas, those that were started longest ago first.

        Of all sagas, without a status and not the overdue ones alone, the newest come first.
        *after* is the id of the last saga of the page before. Ids grow with time, so a page is
        read by an index and costs the same however many sagas there are.
        """
        if status is not None and status not in STATUSES:
            raise ConfigurationError(f"status {status!r}: use one of {', '.join(STATUSES)}")
        newest = status is None and not overdue
        wanted = _summaries().order_by(saga.c.id.desc() if newest else saga.c.id).limit(limit)
        if after is not None:
            wanted = wanted.where(saga.c.id < after if newest else saga.c.id > after)
        if status is not None:
            wanted = wanted.where(saga.c.status == literal_column(f"'{status}'"))
        if kind is not None:
            wanted = wanted.where(saga.c.type == kind)
        if overdue:
            late = saga.c.deadline_at < database_now()
            wanted = wanted.where(late, saga.c.active_key.is_not(None))
        with reading(self._engine).connect() as db:
            return [_summary(row) for row in db.execute(wanted)]

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many sagas there are by type and status."""
        wanted = select(saga.c.type, saga.c.status, func.count()).group_by(
            saga.c.type, saga.c.status
        )
        with reading(self._engine).connect() as db:
            return {(kind, status): number for kind, status, number in db.execute(wanted)}

    def backlog(self) -> SagaBacklog:
        """Return what has not ended; finished sagas are not looked at, however many there are."""
        number = func.count()
        active = (
            select(saga.c.type, saga.c.status, number)
            .where(saga.c.status.in_(_ACTIVE))
            .group_by(saga.c.type, saga.c.status)
        )
        late = saga.c.deadline_at < database_now()
        overdue = (
            select(saga.c.type, number)
            .where(late, saga.c.active_key.is_not(None))
            .group_by(saga.c.type)
        )
        is_run = timer.c.kind == literal_column(f"'{store.RUN}'")
        lag = select(database_now() - timer.c.due).where(~is_run).order_by(timer.c.due)
        lag = lag.limit(literal_column("1"))  # by the index, which min() does not always take
        with reading(self._engine).connect() as db:
            found = {(kind, status): count for kind, status, count in db.execute(active)}
            in_time = dict.fromkeys((kind for kind, _ in found), 0)
            return SagaBacklog(
                active=found,
                overdue_by_saga=in_time | {row[0]: row[1] for row in db.execute(overdue)},
                timer_lag_seconds=max(0.0, float(db.execute(lag).scalar() or 0.0)),
            )

    def check(self, sagas: Sequence[Saga[Any]]) -> Sequence[CheckedInstances]:
        """Return what would become of what is running if only *sagas* were deployed."""
        with reading(self._engine).connect() as db:
            return Definitions(sagas).check(db)

    def show(self, reference: str) -> SagaDetails:
        """Return everything about the saga with this id, or the last one with this key."""
        with reading(self._engine).connect() as db:
            row = _found(db, reference)
            return _details(db, row)

    def act(
        self,
        act: Act,
        reference: str,
        operator: Operator,
        *,
        name: str | None = None,
        payload: bytes | None = None,
    ) -> str:
        """Ask for *act*; return the step that it is about. A worker carries it out.

        Retry, skip and mark-done are about a parked step; its *name* may be left out where only
        one is parked. The entry in the audit trail commits with the request.
        """

        def work(db: Connection) -> str:
            row = store.read(db, _found(db, reference).id, lock=True)
            assert row is not None  # noqa: S101 - it has just been found
            subject = _subject(row, act, name)
            content = payload if act is Act.SIGNAL else operator.reason.encode()
            try:
                with db.begin_nested():
                    db.execute(
                        insert(timer).values(
                            saga_id=row.id, step=subject, direction="do", attempt=0,
                            kind=act.value, type=row.type, version=row.version,
                            due=database_now(), tries=0,
                            payload=content, owner=None, until=0.0, epoch=0,
                        )
                    )  # fmt: skip
            except IntegrityError as error:
                raise ConfigurationError(
                    f"{act.verb} of {subject or 'the saga'} is asked for already: a worker that "
                    f"knows {row.type!r} version {row.version} carries it out"
                ) from error
            detail = {"step": subject, "status": row.status, "key": row.key}
            self._audit.append(db, operator, act.verb, f"{row.type}/{row.id}", detail)
            return subject

        return transact(self._engine, work, clock=self._clock)


def _subject(row: StoredSaga, act: Act, name: str | None) -> str:
    """Return the step that *act* is about, or say why it cannot be done."""
    if row.progress.phase.is_final:
        raise ConfigurationError(f"saga {row.key!r} is {row.status}: there is nothing to do")
    if act is Act.CANCEL:
        if row.status == "compensating":
            raise ConfigurationError(f"saga {row.key!r} is being compensated already")
        return ""
    if act is Act.SIGNAL:
        if name not in row.progress.steps:
            raise NotFound(f"saga {row.type!r} has no step {name!r} that waits for a signal")
        return name
    parked = row.progress.parked
    if not parked:
        raise ConfigurationError(f"saga {row.key!r} is {row.status}: no step of it is parked")
    if name is None:
        if len(parked) > 1:
            raise ConfigurationError(f"several steps are parked: name one of {', '.join(parked)}")
        return parked[0]
    if name not in parked:
        raise ConfigurationError(f"step {name!r} is not parked; this is: {', '.join(parked)}")
    return name


def _found(db: Connection, reference: str) -> StoredSaga:
    row = store.read(db, reference) or store.latest(db, None, reference)
    if row is None:
        raise NotFound(f"there is no saga with the id or key {reference!r}")
    return row


def _summaries() -> Any:
    now = database_now()
    return select(
        saga.c.id, saga.c.type, saga.c.version, saga.c.business_key, saga.c.status, saga.c.reason,
        (now - saga.c.started_at).label("age"), (now - saga.c.changed_at).label("quiet"),
    )  # fmt: skip


def _summary(row: Any) -> SagaSummary:
    return SagaSummary(
        id=row.id,
        type=row.type,
        version=row.version,
        key=row.business_key,
        status=row.status,
        reason=row.reason or "",
        age_seconds=round(float(row.age), 3),
        quiet_seconds=round(float(row.quiet), 3),
    )


def _details(db: Connection, row: StoredSaga) -> SagaDetails:
    now = database_now()
    attempts = select(step, (step.c.ended_at - step.c.began_at).label("took")).where(
        step.c.saga_id == row.id
    )
    waits = select(timer.c.step, timer.c.kind, (timer.c.due - now).label("left")).where(
        timer.c.saga_id == row.id, or_(timer.c.step != "", timer.c.kind == "deadline")
    )
    told = select(history.c.event, history.c.effects, (now - history.c.at).label("ago")).where(
        history.c.saga_id == row.id
    )
    return SagaDetails(
        summary=_summary(db.execute(_summaries().where(saga.c.id == row.id)).one()),
        state=row.data.decode(),
        correlation_id=row.correlation_id,
        steps={name: one.status.value for name, one in row.progress.steps.items()},
        parked=row.progress.parked,
        attempts=[
            AttemptSummary(
                step=one.step, direction=one.direction, attempt=one.attempt, status=one.status,
                seconds=None if one.took is None else round(float(one.took), 3), error=one.error,
                message_id=one.message_id,
            )
            for one in db.execute(attempts.order_by(step.c.began_at, step.c.step))
        ],
        timers=[
            (one.step, one.kind, round(float(one.left), 3))
            for one in db.execute(waits.order_by(timer.c.due))
        ],
        history=[
            (round(float(one.ago), 3), _sentence(one.event, one.effects))
            for one in db.execute(told.order_by(history.c.seq))
        ],
    )  # fmt: skip


def _sentence(event: bytes, effects: bytes) -> str:
    """Return one line of history for people."""
    said = msgspec.json.decode(event)
    name = said.pop("type")
    facts = " ".join(f"{key}={value}" for key, value in said.items() if value != "")
    follows = ", ".join(
        " ".join(str(value) for value in one.values() if value not in ("", False))
        for one in msgspec.json.decode(effects)
    )
    return f"{name} {facts}".strip() + (f" → {follows}" if follows else "")
