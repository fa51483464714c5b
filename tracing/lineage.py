"""Which event came of which: written in the transaction that publishes or handles it.

What is written survives every crash, and no sampling thins it out: an event is in the table if
and only if it was published or handled. It is off unless an `Outbox` or a `Consumer` is given a
`Lineage`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, delete, insert, or_, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.sql import Inseparable, column_text, executed, statements
from holdfast.db.text import cut, fitted, storable
from holdfast.db.transactions import transact
from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.ids import require_name
from holdfast.message import current_message
from holdfast.tracing.schema import lineage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.engine import Connection, Engine

    from holdfast.message import Message

PATH: Final = "x-causation-path"
"""The header that carries the types of the events that led to this one, the first cause first."""
_MOST_TYPE = 60
_PRUNED_AT_ONCE = 1000
REACH: Final = 1_000_000
"""How many numbers away from a row others of its kind are looked for."""
_SPANS = (10_000, 100_000, REACH)
_insert = insert(lineage).values(at=database_now())
WRITTEN_AT_ONCE = 5000
"""How many events one statement takes on PostgreSQL."""


class LineageOutcome(StrEnum):
    """What a service did with an event."""

    PUBLISHED = "published"
    HANDLED = "handled"
    DEAD_LETTERED = "dead-lettered"


class CausationLoop(PoisonMessage):
    """An event would lengthen a chain of causes beyond its bound: services react in a circle.

    The message at hand goes to the dead letters, and the circle ends with it.
    """

    def __init__(self, path: Sequence[str], most: int) -> None:
        told = " → ".join(_circle(path))
        super().__init__(
            f"the chain of causes is longer than {most} events and goes round: {told}. Let one of "
            "them end the circle; if chains are to be as long as this, raise Lineage(most_depth=…)"
        )
        self.path = tuple(path)
        self.most = most


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRecord:
    """What one service did with one event."""

    event_id: str
    type: str
    correlation_id: str
    causation_id: str | None
    source: str
    topic: str
    key: str | None
    time: float
    """When the event happened, POSIX seconds by its producer's clock."""
    outcome: LineageOutcome
    service: str
    error: str | None
    at: float
    """When this was written, by the database's clock."""


class Lineage:
    """Lets an `Outbox` and a `Consumer` write down what *service* publishes and handles.

    Each row commits with the event or the effect that it is about, or not at all. Consumers
    delete rows older than *retention*. A chain of causes longer than *most_depth* is a
    `CausationLoop`, as far as the services in it have a lineage.
    """

    __slots__ = ("most_depth", "retention_seconds", "service")

    def __init__(self, service: str, *, retention: Duration = "30d", most_depth: int = 32) -> None:
        self.service = require_name(service, "Lineage(service)")
        self.retention_seconds = in_seconds(retention, of="retention")
        if not isinstance(most_depth, int) or isinstance(most_depth, bool) or most_depth < 2:
            raise ConfigurationError(f"Lineage(most_depth={most_depth!r}): use 2 or more")
        self.most_depth = most_depth

    def followed(self, message: Message) -> Message:
        """Return the new *message* with the path of its causes, or raise `CausationLoop`."""
        cause = current_message()
        if cause is None:
            return message
        path = [*path_of(cause), _word(cause.type)]
        if len(path) >= self.most_depth:
            raise CausationLoop([*path, _word(message.type)], self.most_depth)
        return message.with_(headers=message.headers.with_({PATH: ",".join(path)}))

    def published(self, db: Connection, messages: Sequence[Message]) -> None:
        """Write that *messages* are published, in the transaction that stages them."""
        self._write(db, messages, LineageOutcome.PUBLISHED)

    def staged(self, messages: Sequence[Message]) -> dict[str, str | None]:
        """Return what the statement that stages *messages* on PostgreSQL takes to write them.

        That is what it has no column of its own for. Raises `Inseparable` where they have to
        be written by themselves.
        """
        return {**_told(messages), "service": self.service}

    def handled(self, db: Connection, messages: Sequence[Message]) -> None:
        """Write that *messages* are handled, in the transaction of their effects."""
        self._write(db, messages, LineageOutcome.HANDLED)

    def dead_lettered(self, db: Connection, message: Message, error: str) -> None:
        """Write that *message* is a dead letter, in the transaction that stores it."""
        self._write(db, [message], LineageOutcome.DEAD_LETTERED, error)

    def prune(
        self, engine: Engine, *, seconds: float | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> int:
        """Delete what is older than the retention, for at most *seconds*; return how many."""
        began, count = clock.monotonic(), 0
        while gone := transact(engine, self._prune_some, clock=clock):
            count += gone
            if seconds is not None and clock.monotonic() - began >= seconds:
                break
        return count

    def _prune_some(self, db: Connection) -> int:
        # By number, which grows with time: the table needs no index for it.
        first = select(lineage.c.seq, lineage.c.at).order_by(lineage.c.seq).limit(1).subquery()
        limit = select(database_now() - self.retention_seconds).scalar_subquery()
        oldest = db.execute(select(first.c.seq).where(first.c.at < limit)).scalar()
        if oldest is None:
            return 0
        among = lineage.c.seq.between(oldest, oldest + _PRUNED_AT_ONCE - 1)
        return db.execute(delete(lineage).where(among, lineage.c.at < limit)).rowcount

    def _write(
        self,
        db: Connection,
        messages: Sequence[Message],
        outcome: LineageOutcome,
        error: str | None = None,
    ) -> None:
        for start in range(0, len(messages), WRITTEN_AT_ONCE):
            self._write_some(db, messages[start : start + WRITTEN_AT_ONCE], outcome, error)

    def _write_some(
        self,
        db: Connection,
        messages: Sequence[Message],
        outcome: LineageOutcome,
        error: str | None,
    ) -> None:
        same = {
            "outcome": outcome.value,
            "service": self.service,
            "error": None if error is None else storable(error),
        }
        if db.dialect.name == "postgresql":
            # psycopg sends one statement per row otherwise, which costs several times as much.
            with suppress(Inseparable):
                write = statements("holdfast.tracing", "postgresql")["write"]
                executed(db, write, {**_columns(messages), **same})
                return
        db.execute(_insert, [_row(one) | same for one in messages])

    def __repr__(self) -> str:
        return f"Lineage({self.service!r})"


def _row(message: Message) -> dict[str, Any]:
    cause = message.causation_id
    return {
        "event_id": fitted(message.id),
        "type": cut(message.type),
        "correlation_id": fitted(message.correlation_id or message.id),
        "causation_id": None if cause is None else fitted(cause),
        "source": cut(message.source),
        "topic": cut(message.topic),
        "message_key": cut(message.key_text),
        "time": message.time.timestamp(),
    }


def _columns(messages: Sequence[Message]) -> dict[str, str | None]:
    """Return the rows of *messages* by column, each as one text; null: as its own id is."""
    types, type_ = _shared([one.type for one in messages])
    topics, topic = _shared([one.topic for one in messages])
    return {
        "ids": column_text([fitted(one.id) for one in messages]),
        "types": types, "type": type_, "topics": topics, "topic": topic,
        "keys": column_text([cut(one.key_text) for one in messages]),
        **_told(messages),
    }  # fmt: skip


def _told(messages: Sequence[Message]) -> dict[str, str | None]:
    """Return those columns that rows of the outbox do not have."""
    sources, source = _shared([one.source for one in messages])
    said = [(one.correlation_id, one.id) for one in messages]
    causes = [one.causation_id for one in messages]
    return {
        "sources": sources, "source": source,
        "correlations": column_text([
            None if one is None or one == own else fitted(one) for one, own in said
        ]),
        "causes": column_text([None if one is None else fitted(one) for one in causes]),
        "times": column_text([repr(one.time.timestamp()) for one in messages]),
    }  # fmt: skip


def _shared(texts: list[str]) -> tuple[str | None, str | None]:
    """Return *texts* cut, as a column; or the one text that all of them are, which is sent once."""
    known = {text: cut(text) for text in set(texts)}
    if len(known) == 1:
        return None, known[texts[0]]
    return column_text([known[text] for text in texts]), None


def path_of(message: Message) -> tuple[str, ...]:
    """Return the types of the events that led to *message*, as far as services told them."""
    said = message.headers.text(PATH)
    return tuple(said.split(",")) if said else ()


def records_of(db: Connection, reference: str, *, most: int | None = None) -> list[LineageRecord]:
    """Return what is written about a correlation, in the order of writing, *most* rows of it.

    *reference* is a correlation id, or the id of any event in it.
    """
    found = _records(db, reference, most)
    if found:
        return found
    known = select(lineage.c.correlation_id).where(_caused(fitted(reference)))
    correlation = db.execute(known.limit(1)).scalar()
    return [] if correlation is None else _records(db, correlation, most)


def _records(db: Connection, correlation: str, most: int | None) -> list[LineageRecord]:
    wanted = select(lineage).where(lineage.c.correlation_id == fitted(correlation))
    return [record_of(row) for row in db.execute(wanted.order_by(lineage.c.seq).limit(most))]


def about_event(event_id: str) -> ColumnElement[bool]:
    """Return the condition of the rows about one event, by an index in either case."""
    first = and_(lineage.c.correlation_id == event_id, lineage.c.event_id == event_id)
    return or_(_caused(event_id), first)


def _caused(event_id: str) -> ColumnElement[bool]:
    """Return the condition of rows about an event that did not begin its correlation."""
    return and_(lineage.c.event_id == event_id, lineage.c.event_id != lineage.c.correlation_id)


def beside(
    db: Connection, wanted: Select[Any], number: int, *, forward: bool, most: int
) -> list[Any]:
    """Return the *most* rows that *wanted* finds nearest to the row *number*, on one side of it.

    No index knows more than numbers, so it looks at the nearest first and at `REACH` at most.
    """
    found: list[Any] = []
    seq, near = lineage.c.seq, 0
    for far in _SPANS:
        span = (number + near + 1, number + far) if forward else (number - far, number - near - 1)
        some = wanted.where(seq.between(*span)).order_by(seq if forward else seq.desc())
        found += db.execute(some.limit(most - len(found))).all()
        if len(found) == most:
            break
        near = far
    return found


def record_of(row: Any) -> LineageRecord:
    """Return a row of the table."""
    return LineageRecord(
        event_id=row.event_id, type=row.type, correlation_id=row.correlation_id,
        causation_id=row.causation_id, source=row.source, topic=row.topic,
        key=row.message_key, time=row.time, outcome=LineageOutcome(row.outcome),
        service=row.service, error=row.error, at=row.at,
    )  # fmt: skip


def _circle(path: Sequence[str]) -> Iterable[str]:
    """Return the end of *path* from where its last type came before: one time round."""
    last = path[-1]
    earlier = next((at for at in range(len(path) - 2, -1, -1) if path[at] == last), None)
    return path[-6:] if earlier is None else path[earlier:]


def _word(type_: str) -> str:
    return type_[:_MOST_TYPE].replace(",", ";")
