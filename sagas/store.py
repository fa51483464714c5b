"""The rows of sagas; every function joins the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Text, and_, any_, cast, delete, insert, literal, select
from sqlalchemy.dialects.postgresql import ARRAY

from holdfast.db.clock import database_now
from holdfast.errors import StaleDelivery
from holdfast.sagas.schema import saga, signal, timer
from holdfast.sagas.states import (
    Answer,
    Answered,
    Migrated,
    SagaEffect,
    SagaEvent,
    SagaPhase,
    SagaProgress,
    TimerKind,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection

    from holdfast.message import Message

RUN = "run"
"""The kind of a timer that stands for a local step to run."""
REPLY = "reply"
"""The kind of a timer that stands for a reply which came to a program without the version."""


class KeptReply(msgspec.Struct, frozen=True, array_like=True):
    """What a reply said, until a worker takes it that knows the saga's version."""

    answer: Answer
    error: str
    payload: bytes | None


_json = msgspec.json.Encoder().encode
_packed = msgspec.msgpack.Encoder().encode
kept_reply = msgspec.msgpack.Decoder(KeptReply).decode
_progress = msgspec.json.Decoder(SagaProgress).decode
_COLUMNS = (
    saga.c.id, saga.c.type, saga.c.version, saga.c.hash, saga.c.business_key, saga.c.status,
    saga.c.progress, saga.c.data, saga.c.start_digest, saga.c.revision, saga.c.correlation_id,
    saga.c.traceparent,
)  # fmt: skip
_SAGAS = select(*_COLUMNS).order_by(saga.c.id)
_REVISIONS = select(saga.c.id, saga.c.revision).order_by(saga.c.id)


class SagaConflict(StaleDelivery):
    """Somebody else was quicker with this saga; nothing was written, read it again."""

    def __init__(self, saga_id: str, revision: int) -> None:
        super().__init__(f"saga {saga_id} is past revision {revision}: another worker was quicker")
        self.saga_id = saga_id
        self.revision = revision


class StoredSaga(msgspec.Struct, frozen=True, kw_only=True):
    """One saga as it was read."""

    id: str
    type: str
    version: int
    hash: str
    key: str
    status: str
    progress: SagaProgress
    data: bytes
    start_digest: str
    revision: int
    correlation_id: str | None
    traceparent: str | None


class TimerRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One timer: the attempt that it belongs to, its kind, and when it fires."""

    step: str
    direction: str
    attempt: int
    kind: str
    delay: float


class StepRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt at a step; without `ended` it has just begun."""

    step: str
    direction: str
    attempt: int
    status: str
    message_id: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Changes:
    """What transitions make of one saga's rows; several of one saga add up."""

    row: StoredSaga
    """As it was read."""
    after: StoredSaga
    """As it is to be written; what it was read from is the same until `follow`."""
    history: list[dict[str, Any]] = field(default_factory=list)
    begun: list[StepRow] = field(default_factory=list)
    ended: list[StepRow] = field(default_factory=list)
    timers: list[TimerRow] = field(default_factory=list)
    cleared: list[tuple[str, bool]] = field(default_factory=list)
    commands: list[Message] = field(default_factory=list)

    def follow(
        self,
        progress: SagaProgress,
        data: bytes,
        told: Sequence[tuple[SagaEvent | Migrated, Sequence[SagaEffect]]],
        causation_id: str | None,
        definition: tuple[int, str] | None = None,
    ) -> None:
        """Go on by one transition; late events are told as well.

        *definition* is the version and the hash that the saga goes on with, if these change.
        """
        version, shape = definition or (self.after.version, self.after.hash)
        seq = self.after.revision * 1000  # room for what follows from one another
        self.history += [
            {
                "saga_id": self.row.id, "seq": seq + number, "event": _json(event),
                "effects": _json(list(effects)), "causation_id": causation_id,
            }
            for number, (event, effects) in enumerate(told)
        ]  # fmt: skip
        self.after = replace(
            self.after, progress=progress, data=data, status=status_of(progress),
            revision=self.after.revision + 1, version=version, hash=shape,
        )  # fmt: skip

    def clear_timers(self, name: str, *, keep_deadline: bool) -> None:
        """Remove the timers of a step, or of the whole saga; also those that were just set.

        Replies that are kept are never lost.
        """
        self.cleared.append((name, keep_deadline))
        self.timers = [
            one
            for one in self.timers
            if (name and one.step != name) or (keep_deadline and one.kind == TimerKind.DEADLINE)
        ]

    @property
    def deadline(self) -> float | None:
        """In how many seconds the saga is overdue, where that begins to count now."""
        is_whole = (one for one in self.timers if not one.step and one.kind == TimerKind.DEADLINE)
        return next((one.delay for one in is_whole), None)


def status_of(progress: SagaProgress) -> str:
    """Return how people call where a saga is."""
    if progress.parked:
        return "parked"
    match progress.phase:
        case SagaPhase.FORWARD:
            return "running"
        case SagaPhase.QUIESCING | SagaPhase.BACKWARD:
            return "compensating"
        case phase:
            return phase.value


def read(db: Connection, saga_id: str, *, lock: bool = False) -> StoredSaga | None:
    """Return the saga, None if there is none; with *lock* nobody else changes it meanwhile."""
    wanted = select(*_COLUMNS).where(saga.c.id == saga_id)
    return _read(db, wanted.with_for_update() if lock else wanted)


def locked_all(db: Connection, saga_ids: Collection[str]) -> dict[str, StoredSaga]:
    """Return those of the sagas that are there, which nobody else changes until the commit.

    They are locked in the order of their ids: two who want the same ones never wait for each other.
    """
    return _all(db, _SAGAS.where(is_among(db, saga.c.id, saga_ids)).with_for_update())


def lock_all(db: Connection, saga_ids: Collection[str]) -> dict[str, int]:
    """Lock sagas as `locked_all` does; return the revision of each."""
    wanted = _REVISIONS.where(is_among(db, saga.c.id, saga_ids)).with_for_update()
    return {row.id: row.revision for row in db.execute(wanted)}


def read_all(db: Connection, saga_ids: Collection[str]) -> dict[str, StoredSaga]:
    """Return those of the sagas that are there, without locking them."""
    return _all(db, _SAGAS.where(is_among(db, saga.c.id, saga_ids)))


def is_among(db: Connection, column: Any, ids: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that *column* is one of *ids*.

    PostgreSQL gets them as one parameter: a list of a hundred costs the driver more than all else.
    """
    if db.dialect.name != "postgresql":
        return column.in_(sorted(ids))  # type: ignore[no-any-return]
    quoted = (one.replace("\\", r"\\").replace('"', r"\"") for one in sorted(ids))
    listed = "{" + ",".join(f'"{one}"' for one in quoted) + "}"
    return column == any_(cast(literal(listed, Text), ARRAY(Text)))  # type: ignore[no-any-return]


def _all(db: Connection, wanted: Any) -> dict[str, StoredSaga]:
    return {row.id: _stored(row) for row in db.execute(wanted)}


def active(db: Connection, kind: str, key: str) -> StoredSaga | None:
    """Return the saga of *kind* that has *key* now."""
    return _read(db, select(*_COLUMNS).where(saga.c.type == kind, saga.c.active_key == key))


def latest(db: Connection, kind: str | None, key: str) -> StoredSaga | None:
    """Return the saga that was started last with *key*."""
    wanted = select(*_COLUMNS).where(saga.c.business_key == key)
    if kind is not None:
        wanted = wanted.where(saga.c.type == kind)
    return _read(db, wanted.order_by(saga.c.started_at.desc(), saga.c.id.desc()).limit(1))


def running(db: Connection, kinds: Collection[str], *, after: str, limit: int) -> list[StoredSaga]:
    """Return sagas of *kinds* that have not ended, by id, those behind id *after*."""
    wanted = (
        select(*_COLUMNS)
        .where(saga.c.active_key.is_not(None), saga.c.type.in_(kinds), saga.c.id > after)
        .order_by(saga.c.id)
        .limit(limit)
    )
    return [_stored(row) for row in db.execute(wanted)]


def keep_reply(db: Connection, row: StoredSaga, event: Answered, payload: bytes | None) -> None:
    """Leave a reply to the workers that know the saga's version; of the same reply one is kept."""
    mine = is_timer(row.id, event.step, event.direction.value, event.attempt, REPLY)
    if db.execute(select(timer.c.due).where(mine)).first() is not None:
        return
    db.execute(
        insert(timer).values(
            saga_id=row.id, step=event.step, direction=event.direction.value,
            attempt=event.attempt, kind=REPLY, type=row.type, version=row.version,
            due=database_now(), tries=0, owner=None, until=0.0, epoch=0,
            payload=_packed(KeptReply(event.answer, event.error, payload)),
        )
    )  # fmt: skip


def keep_signal(db: Connection, saga_id: str, name: str, payload: bytes | None) -> None:
    """Keep a signal until it is waited for."""
    db.execute(
        insert(signal).values(saga_id=saga_id, name=name, payload=payload, at=database_now())
    )


def take_signal(db: Connection, saga_id: str, name: str) -> bytes | None:
    """Return the payload of a signal that was kept, which is kept no longer."""
    mine = and_(signal.c.saga_id == saga_id, signal.c.name == name)
    payload: bytes | None = db.execute(select(signal.c.payload).where(mine)).scalar()
    db.execute(delete(signal).where(mine))
    return payload


def is_timer(
    saga_id: str, name: str, direction: str, attempt: int, kind: str
) -> ColumnElement[bool]:
    """Return the condition that finds one timer."""
    return and_(
        timer.c.saga_id == saga_id, timer.c.step == name, timer.c.direction == direction,
        timer.c.attempt == attempt, timer.c.kind == kind,
    )  # fmt: skip


def _read(db: Connection, wanted: Any) -> StoredSaga | None:
    found = db.execute(wanted).one_or_none()
    return None if found is None else _stored(found)


def _stored(found: Any) -> StoredSaga:
    (id_, type_, version, hash_, key, status, progress, data, digest, revision, correlation,
     traceparent) = found  # fmt: skip
    return StoredSaga(
        id=id_, type=type_, version=version, hash=hash_, key=key, status=status,
        progress=_progress(progress), data=data, start_digest=digest, revision=revision,
        correlation_id=correlation, traceparent=traceparent,
    )  # fmt: skip
