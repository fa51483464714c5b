"""Writing transitions: the rows of many sagas, with a few statements for all of them.

Every function joins the caller's transaction.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Text, bindparam, delete, insert, update

from holdfast.db.clock import database_now
from holdfast.db.sql import statements
from holdfast.db.text import plain
from holdfast.sagas.locks import release_all
from holdfast.sagas.schema import history, saga, step, timer
from holdfast.sagas.states import TimerKind
from holdfast.sagas.store import REPLY, SagaConflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.sagas.store import Changes, StepRow

_json = msgspec.json.Encoder().encode


def _saving(**more: Any) -> Any:
    # The guard: a worker that was overtaken changes nothing.
    guarded = update(saga).where(
        saga.c.id == bindparam("own_id"), saga.c.revision == bindparam("read_revision")
    )
    return guarded.values(
        progress=bindparam("new_progress"), data=bindparam("new_data"),
        status=bindparam("new_status"), reason=bindparam("new_reason"),
        revision=bindparam("new_revision"), version=bindparam("new_version"),
        hash=bindparam("new_hash"), changed_at=database_now(), **more,
    )  # fmt: skip


# What a saga has become is news again, so it is told again.
_SAVE = _saving()
_SAVE_NEWS = _saving(alerted_at=None)
_SAVE_END = _saving(
    alerted_at=None, active_key=None, deadline_at=None, ended_at=database_now()
)  # fmt: skip
_ADD_HISTORY = insert(history).values(at=database_now())
_BEGIN_STEP = insert(step).values(began_at=database_now())
_END_STEP = (
    update(step)
    .where(
        step.c.saga_id == bindparam("own_id"), step.c.step == bindparam("own_step"),
        step.c.direction == bindparam("own_direction"),
        step.c.attempt == bindparam("own_attempt"),
    )
    .values(
        status=bindparam("new_status"), error=bindparam("new_error"), ended_at=database_now()
    )
)  # fmt: skip
_SET_TIMER = insert(timer).values(
    due=database_now() + bindparam("delay"), tries=0, owner=None, until=0.0, epoch=0
)
_ALL_TIMERS = delete(timer).where(timer.c.saga_id == bindparam("own_id"), timer.c.kind != REPLY)
_STEP_TIMERS = _ALL_TIMERS.where(timer.c.step == bindparam("own_step"))
_CLEAR_TIMERS = {
    # (of a step, deadlines stay)
    (True, False): _STEP_TIMERS,
    (True, True): _STEP_TIMERS.where(timer.c.kind != TimerKind.DEADLINE.value),
    (False, False): _ALL_TIMERS,
    (False, True): _ALL_TIMERS.where(timer.c.kind != TimerKind.DEADLINE.value),
}


def write(db: Connection, changes: Sequence[Changes]) -> None:
    """Write transitions over the revisions that were read, or raise `SagaConflict`.

    The saga rows come first: who was overtaken writes nothing else.
    """
    if ended := [one.row.id for one in changes if _ends(one)]:
        release_all(db, ended)
    if db.dialect.name == "postgresql":
        if _sets_what_it_clears(changes):
            # Before: of one statement PostgreSQL would do both in any order.
            db.execute(_statement("clear_timers", "cleared"), {"cleared": _cleared(changes)})
        if _written_at_once(db, changes, changes) != len(changes):
            raise SagaConflict(changes[0].row.id, changes[0].row.revision)
        return
    moved: dict[int, list[Changes]] = {}
    kinds = (_SAVE, _SAVE_NEWS, _SAVE_END)
    for one in changes:
        kind = 2 if _ends(one) else 1 if one.after.status != one.row.status else 0
        moved.setdefault(kind, []).append(one)
    for kind, some in moved.items():
        if db.execute(kinds[kind], [_saved(one) for one in some]).rowcount != len(some):
            raise SagaConflict(some[0].row.id, some[0].row.revision)
    _write_followers(db, changes)


def _ends(one: Changes) -> bool:
    return one.after.status != one.row.status and one.after.progress.phase.is_final


def add(db: Connection, one: Changes) -> None:
    """Insert the row of a saga that begins; an `IntegrityError` means that its key is taken."""
    after = one.after
    ended = after.progress.phase.is_final
    delay = None if ended else one.deadline
    now = database_now()
    db.execute(
        insert(saga).values(
            id=after.id, type=after.type, version=after.version, hash=after.hash,
            business_key=after.key, active_key=None if ended else after.key, status=after.status,
            progress=_json(after.progress), data=after.data, start_digest=after.start_digest,
            revision=after.revision, reason=plain(after.progress.reason),
            correlation_id=after.correlation_id, traceparent=after.traceparent,
            started_at=now, changed_at=now, ended_at=now if ended else None,
            deadline_at=None if delay is None else now + delay,
        )
    )  # fmt: skip


def _written_at_once(db: Connection, saved: Sequence[Changes], changes: Sequence[Changes]) -> int:
    """Write everything with one statement; return how many rows fitted."""
    rows = {
        "sagas": [_saved_at_once(one) for one in saved],
        "ended": [
            {"saga_id": one.row.id, **_texts(attempt)} for one in changes for attempt in one.ended
        ],
        "begun": [_begun(one.row.id, attempt) for one in changes for attempt in one.begun],
        "timers": list(_timers(changes)),
        "history": [
            {**entry, "event": entry["event"].decode(), "effects": entry["effects"].decode()}
            for one in changes
            for entry in one.history
        ],
    }
    command = _statement("write", *rows, "cleared")
    encoded: dict[str, Any] = {name: _json(some).decode() for name, some in rows.items()}
    encoded |= {"cleared": _cleared(changes), "starts": not saved}
    return int(db.execute(command, encoded).scalar_one())


def _sets_what_it_clears(changes: Sequence[Changes]) -> bool:
    """Whether a timer is set anew for a step whose timers go: it may be the very same row."""
    return any(
        not name or due.step == name
        for one in changes
        for due in one.timers
        for name, _ in one.cleared
    )


def _cleared(changes: Sequence[Changes]) -> str:
    cleared = [
        {"saga_id": one.row.id, "step": name, "keep": keep}
        for one in changes
        for name, keep in one.cleared
    ]
    return _json(cleared).decode()


@cache
def _statement(name: str, *texts: str) -> Any:
    found = statements("holdfast.sagas", "postgresql")[name]
    return found.bindparams(*(bindparam(one, type_=Text) for one in texts))


def write_followers(db: Connection, one: Changes) -> None:
    """Write what follows from the row of a saga that begins: attempts, timers and history."""
    if db.dialect.name == "postgresql":
        _written_at_once(db, [], [one])
    else:
        _write_followers(db, [one])


def _write_followers(db: Connection, changes: Sequence[Changes]) -> None:
    if ended := [_ended(one.row.id, attempt) for one in changes for attempt in one.ended]:
        db.execute(_END_STEP, ended)
    if begun := [_begun(one.row.id, attempt) for one in changes for attempt in one.begun]:
        db.execute(_BEGIN_STEP, begun)
    _clear_timers(db, changes)
    if timers := list(_timers(changes)):
        db.execute(_SET_TIMER, timers)
    if told := [entry for one in changes for entry in one.history]:
        db.execute(_ADD_HISTORY, told)


def _clear_timers(db: Connection, changes: Sequence[Changes]) -> None:
    cleared: dict[tuple[bool, bool], list[dict[str, str]]] = {}
    for one in changes:
        if any(not name and not keep for name, keep in one.cleared):
            wanted = [("", False)]  # which includes the others
        else:
            wanted = one.cleared
        for name, keep in wanted:
            own = {"own_id": one.row.id} | ({"own_step": name} if name else {})
            cleared.setdefault((bool(name), keep), []).append(own)
    for kind, owners in cleared.items():
        db.execute(_CLEAR_TIMERS[kind], owners)


def _saved(one: Changes) -> dict[str, Any]:
    after = one.after
    return {
        "own_id": after.id, "read_revision": one.row.revision,
        "new_progress": _json(after.progress), "new_data": after.data,
        "new_status": after.status, "new_reason": plain(after.progress.reason),
        "new_revision": after.revision, "new_version": after.version, "new_hash": after.hash,
    }  # fmt: skip


def _saved_at_once(one: Changes) -> dict[str, Any]:
    after = one.after
    return {
        "id": after.id, "read": one.row.revision, "revision": after.revision,
        "progress": _json(after.progress).decode(), "data": after.data.decode(),
        "status": after.status, "reason": plain(after.progress.reason), "version": after.version,
        "hash": after.hash, "ends": _ends(one),
    }  # fmt: skip


def _texts(one: StepRow) -> dict[str, Any]:
    return {
        "step": one.step, "direction": one.direction, "attempt": one.attempt,
        "status": one.status, "error": None if one.error is None else plain(one.error),
    }  # fmt: skip


def _begun(saga_id: str, one: StepRow) -> dict[str, Any]:
    return {
        "saga_id": saga_id, "step": one.step, "direction": one.direction, "attempt": one.attempt,
        "status": one.status, "message_id": one.message_id,
        "error": None if one.error is None else plain(one.error),
    }  # fmt: skip


def _ended(saga_id: str, one: StepRow) -> dict[str, Any]:
    return {
        "own_id": saga_id, "own_step": one.step, "own_direction": one.direction,
        "own_attempt": one.attempt, "new_status": one.status,
        "new_error": None if one.error is None else plain(one.error),
    }  # fmt: skip


def _timers(changes: Iterable[Changes]) -> Iterable[dict[str, Any]]:
    for one in changes:
        for due in one.timers:
            yield {
                "saga_id": one.row.id, "step": due.step, "direction": due.direction,
                "attempt": due.attempt, "kind": due.kind, "type": one.row.type,
                "version": one.after.version, "delay": due.delay,
            }  # fmt: skip
