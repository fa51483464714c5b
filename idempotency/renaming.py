"""Renaming a scope: what is remembered under one name is remembered under another from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, exists, func, insert, literal, select, update

from holdfast.db.sql import statements
from holdfast.db.text import fitted
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency.identity import consumer_key
from holdfast.idempotency.inbox import entered_name
from holdfast.idempotency.schema import attempt, inbox, lease, roster, scope
from holdfast.ids import require_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """What went from one name to another."""

    old: str
    new: str
    remembered: int
    """Handled messages, those included that the new name knew already."""
    attempts: int
    """Messages whose failures are counted."""


def rename(
    engine: Engine,
    old: str,
    new: str,
    *,
    record: Callable[[Connection, Renamed], object] = lambda _db, _done: None,
) -> Renamed:
    """Move what *old* remembers to *new*, which keeps what it remembers itself.

    It is one transaction, in which *record* writes down that it was done: handlers see all of
    it or nothing. Stop the consumer that still writes under *old* first.
    """
    require_name(new, f"rename to {new!r}")
    if old == new:
        raise ConfigurationError(f"{old!r} has that name already: name another one")

    def work(db: Connection) -> Renamed:
        gone, kept = consumer_key(old), consumer_key(new)
        entry = db.execute(select(roster).where(roster.c.id == gone)).one_or_none()
        counted = _count(db, attempt, attempt.c.consumer == fitted(old))
        if entry is None and not counted:
            raise NotFound(
                f"no consumer {old!r} has an inbox here: holdfast inbox stats lists them"
            )
        remembered = 0
        if entry is not None:
            _enter(db, new, entry.window_seconds)
            _carry_on(db, gone, kept)
            remembered = _moved(db, inbox, gone, kept)
            _moved(db, lease, gone, kept)
            db.execute(delete(scope).where(scope.c.id == gone))
            db.execute(delete(roster).where(roster.c.id == gone))
        _move_attempts(db, fitted(old), fitted(new))
        done = Renamed(old=old, new=new, remembered=remembered, attempts=counted)
        record(db, done)
        return done

    return transact(engine, work)


def _enter(db: Connection, name: str, window: float | None) -> None:
    number = consumer_key(name)
    if db.execute(select(roster.c.id).where(roster.c.id == number)).first() is None:
        values = {"id": number, "name": entered_name(name), "window_seconds": window}
        db.execute(insert(roster), values)
        db.execute(insert(scope), {"id": number, "carried_at": 0.0})


def _carry_on(db: Connection, gone: int, kept: int) -> None:
    """Have the new scope ask for rows of earlier versions, where the old one had such."""
    both = select(scope).where(scope.c.id.in_((gone, kept)))
    known = {row.id: row.carried_at for row in db.execute(both)}
    if known.get(gone) == 0 or known.get(kept, 0) != 0:
        return
    sql = statements("holdfast.idempotency", db.dialect.name)
    now = known.get(gone) or float(db.execute(sql["now"]).scalar_one())
    db.execute(update(scope).where(scope.c.id == kept).values(carried_at=now))


def _moved(db: Connection, table: Any, gone: int, kept: int) -> int:
    """Give the rows of *gone* to *kept*, except those that it has."""
    mine = table.c.consumer == gone
    count = _count(db, table, mine)
    other = table.alias()
    there = exists().where(other.c.consumer == kept, other.c.message == table.c.message)
    rest = [column for column in table.c if column.name != "consumer"]
    copied = select(literal(kept).label("consumer"), *rest).where(mine, ~there)
    db.execute(insert(table).from_select(["consumer", *(column.name for column in rest)], copied))
    db.execute(delete(table).where(mine))
    return count


def _move_attempts(db: Connection, old: str, new: str) -> None:
    mine, others = attempt.c.consumer == old, attempt.c.consumer == new
    known = set(db.execute(select(attempt.c.message_id).where(others)).scalars())
    for one in db.execute(select(attempt.c.message_id).where(mine)).scalars().all():
        if one not in known:
            same = mine & (attempt.c.message_id == one)
            db.execute(update(attempt).where(same).values(consumer=new))
    db.execute(delete(attempt).where(mine))


def _count(db: Connection, table: Any, condition: Any) -> int:
    return int(db.execute(select(func.count()).select_from(table).where(condition)).scalar_one())
