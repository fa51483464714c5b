"""What the inbox of a database holds, by consumer: for operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, inspect, select

from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency.keys import consumer_key, message_key
from holdfast.idempotency.schema import ahead, attempt, inbox, lease, metadata, roster, start
from holdfast.message import SOURCE_END
from holdfast.sql import statements
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine


class MissingInbox(ConfigurationError):
    """The database lacks tables of the inbox; nothing was read or written."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__(
            f"the database lacks {', '.join(tables)}: run  holdfast db upgrade  with the same "
            "--database (or include holdfast.idempotency.metadata in your own migrations)"
        )
        self.tables = tuple(tables)


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
    """Raise `MissingInbox` unless all tables are there."""
    inspector = inspect(db)
    missing = [name for name in sorted(metadata.tables) if not inspector.has_table(name)]
    if missing:
        raise MissingInbox(missing)


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
