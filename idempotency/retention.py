"""Pruning: rows that are older than their consumer's window, a few at a time.

What the inbox of a database holds, by consumer: for operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.sql import statements
from holdfast.db.tables import require_tables
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency.claim import unclaim_number
from holdfast.idempotency.identity import consumer_key, message_key
from holdfast.idempotency.schema import ahead, attempt, inbox, lease, metadata, roster, start
from holdfast.message import SOURCE_END

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine


def prune(
    engine: Engine,
    *,
    consumer: str | None = None,
    step: int = 500,
    seconds: float = math.inf,
    progress: Callable[[str, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, int]:
    """Delete what each consumer (or only *consumer*) need not remember; return how many rows.

    Each *step* is a short transaction that skips what another pruner has in hand, so several
    may run at once and no handler waits. After *seconds* no further step begins: call it again
    to go on. *progress* is told the consumer and each step.
    """
    if step < 1:
        raise ConfigurationError(f"prune(step={step}): use 1 or more")
    pruned: dict[str, int] = {}
    until = clock.monotonic() + seconds
    sql = statements("holdfast.idempotency", engine.dialect.name)
    for number, name, window in _windows(engine, consumer):
        if window is None:
            continue

        def work(db: Connection, number: int = number, window: float = window) -> int:
            expired = {"consumer": number, "age": window, "most": step}
            keys = [bytes(key) for key in db.execute(sql["old_rows"], expired).scalars()]
            unclaim_number(db, number, keys)
            db.execute(sql["prune_leases"], {"consumer": number, "age": window})
            return len(keys)

        while done := transact(engine, work, clock=clock):
            pruned[name] = pruned.get(name, 0) + done
            if progress is not None:
                progress(name, done)
            if clock.monotonic() >= until:
                return pruned
    return pruned


def prunable(engine: Engine, *, consumer: str | None = None, most: int = 10_000) -> dict[str, int]:
    """Count what `prune` would delete now, of each consumer (or only *consumer*) up to *most*."""
    found: dict[str, int] = {}
    for number, name, window in _windows(engine, consumer):
        if window is None:
            continue
        is_old = inbox.c.handled_at < database_now() - window
        some = select(inbox.c.message).where(inbox.c.consumer == number, is_old).limit(most)
        with engine.connect() as db:
            count = db.execute(select(func.count()).select_from(some.subquery())).scalar_one()
        if count:
            found[name] = count
    return found


def _windows(engine: Engine, consumer: str | None) -> list[Any]:
    query = select(roster.c.id, roster.c.name, roster.c.window_seconds).order_by(roster.c.name)
    if consumer is not None:
        query = query.where(roster.c.name == consumer)
    with engine.connect() as db:
        rows = list(db.execute(query))
    if consumer is not None and not rows:
        raise NotFound(
            f"no consumer {consumer!r} has an inbox here: holdfast inbox stats lists them"
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStats:
    """The memory of one consumer."""

    consumer: str
    remembered: int
    oldest: datetime | None
    newest: datetime | None
    window_seconds: float | None
    """How long a row is kept; None for ever."""
    overdue: int
    """Rows beyond the window that wait to be pruned."""
    leased: int
    """Messages that a worker has a lease on now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxStats:
    """What the tables hold."""

    consumers: tuple[ConsumerStats, ...]
    failing: int
    """Messages with a failed, released or crashed attempt that are not settled yet."""
    suspects: int
    """Those among them that were in flight when their process died."""
    in_flight: int
    """Starts that are not finished."""
    ahead: int
    """Messages that wait for an earlier version of their entity."""


def require_inbox(db: Connection) -> None:
    """Raise `MissingTables` unless all tables of the inbox are there."""
    otherwise = " (or include holdfast.idempotency.metadata in your own migrations)"
    require_tables(db, metadata, otherwise=otherwise)


def stats(engine: Engine) -> InboxStats:
    """Count what the tables hold; it reads all of the inbox, so ask now and then, not always."""
    with engine.connect() as db:
        require_inbox(db)
        now = float(
            db.execute(statements("holdfast.idempotency", engine.dialect.name)["now"]).scalar_one()
        )
        names = {row.id: row for row in db.execute(select(roster))}
        memory = {
            row.consumer: row
            for row in db.execute(
                select(
                    inbox.c.consumer,
                    func.count().label("rows"),
                    func.min(inbox.c.handled_at).label("oldest"),
                    func.max(inbox.c.handled_at).label("newest"),
                ).group_by(inbox.c.consumer)
            )
        }
        held = select(lease.c.consumer, func.count()).where(lease.c.until > now)
        leased = {row[0]: row[1] for row in db.execute(held.group_by(lease.c.consumer))}
        suspect = (attempt.c.suspected > 0) | (attempt.c.crashed > 0)
        found = [
            _of_consumer(db, number, names.get(number), memory.get(number), leased, now)
            for number in {*names, *memory}
        ]
        return InboxStats(
            consumers=tuple(sorted(found, key=lambda row: row.consumer)),
            failing=_count(db, attempt),
            suspects=_count(db, attempt, suspect),
            in_flight=_count(db, start),
            ahead=_count(db, ahead),
        )


def forget(
    engine: Engine,
    consumer: str,
    ids: Sequence[str],
    *,
    source: str | None = None,
    record: Callable[[Connection, list[str]], object] = lambda _db, _ids: None,
) -> list[str]:
    """Forget handled messages, so that they may be handled again; return those that were known.

    *source* is that of the messages, where they have one: it is a part of their identity. What an
    earlier version remembers by the bare id is forgotten with it.

    *record* writes down in the same transaction that it was done: both happen or neither.
    """
    keys = {message_key(id_): id_ for id_ in ids}
    if source is not None:
        keys |= {message_key(f"{source}{SOURCE_END}{id_}"): id_ for id_ in ids}
    number = consumer_key(consumer)

    def work(db: Connection) -> list[str]:
        if db.execute(select(roster.c.id).where(roster.c.id == number)).one_or_none() is None:
            raise NotFound(
                f"no consumer {consumer!r} has an inbox here: holdfast inbox stats lists them"
            )
        mine = inbox.c.consumer == number
        wanted = select(inbox.c.message).where(mine, inbox.c.message.in_(sorted(keys)))
        known = [bytes(key) for key in db.execute(wanted).scalars()]
        db.execute(inbox.delete().where(mine, inbox.c.message.in_(sorted(known))))
        forgotten = sorted({keys[key] for key in known})
        if forgotten:
            record(db, forgotten)
        return forgotten

    return transact(engine, work)


def _of_consumer(
    db: Connection, number: int, entry: Any, memory: Any, leased: dict[int, int], now: float
) -> ConsumerStats:
    window = None if entry is None else entry.window_seconds
    overdue = 0
    if window is not None and memory is not None and memory.oldest < now - window:
        old = (inbox.c.consumer == number) & (inbox.c.handled_at < now - window)
        overdue = _count(db, inbox, old)
    return ConsumerStats(
        consumer=f"unknown ({number})" if entry is None else entry.name,
        remembered=0 if memory is None else memory.rows,
        oldest=None if memory is None else datetime.fromtimestamp(memory.oldest, UTC),
        newest=None if memory is None else datetime.fromtimestamp(memory.newest, UTC),
        window_seconds=window,
        overdue=overdue,
        leased=leased.get(number, 0),
    )


def _count(db: Connection, table: Any, condition: Any = None) -> int:
    query = select(func.count()).select_from(table)
    return db.execute(query if condition is None else query.where(condition)).scalar_one()
