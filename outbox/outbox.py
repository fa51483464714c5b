"""Staging events in the caller's own transaction.

Many rows are inserted with one statement, in their order. Through asyncio, what was never
awaited fails the commit, instead of being lost.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec
from sqlalchemy import LargeBinary, Text, bindparam, column, event, insert
from sqlalchemy.exc import DBAPIError

from holdfast.codec import JsonCodec
from holdfast.db.sql import Inseparable, statements
from holdfast.errors import ConfigurationError, MessageTooLarge
from holdfast.message import Message
from holdfast.outbox.bulk import insert_all, insert_messages
from holdfast.outbox.event import Event, Options, event_of
from holdfast.outbox.rows import fields, values
from holdfast.outbox.schema import delayed, outbox
from holdfast.tracing import switch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from sqlalchemy import ColumnClause
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session
    from sqlalchemy.sql.dml import UpdateBase

    from holdfast.codec import Codec
    from holdfast.tracing.lineage import Lineage


_FORGOTTEN = "holdfast_not_awaited"


def staged_async(
    session: Any, stage: Callable[[Any], None], messages: list[Message]
) -> Awaitable[list[Message]]:
    """Return what stages *messages* when it is awaited.

    Until then an `AsyncSession` refuses to commit: a forgotten `await` would lose the events.
    """
    sync: Session | None = getattr(session, "sync_session", None)
    waiting = set() if sync is None else _waiting(sync)
    waiting.add(token := object())

    async def work() -> list[Message]:
        waiting.discard(token)
        await session.run_sync(stage)
        return messages

    return work()


def _waiting(session: Session) -> set[object]:
    waiting: set[object] | None = session.info.get(_FORGOTTEN)
    if waiting is None:
        waiting = session.info[_FORGOTTEN] = set()
        event.listen(session, "before_commit", _refuse)
        event.listen(session, "after_rollback", _forget)
    return waiting


def _refuse(session: Session) -> None:
    if count := len(session.info[_FORGOTTEN]):
        raise ConfigurationError(
            f"{count} event(s) were added to an AsyncSession and never awaited, so they are not "
            "staged: write  await outbox.add(session, …)"
        )


def _forget(session: Session) -> None:
    session.info[_FORGOTTEN].clear()


_SUSPECT_BYTES, _SPARE_BYTES = 500_000, 10_000
"""From which size an event may be why a server went away; and what a statement has around it."""
_json = msgspec.json.Encoder().encode


@contextmanager
def too_large_told(db: Connection, messages: Sequence[Message]) -> Iterator[None]:
    """Raise `MessageTooLarge` where that is why: MySQL and MariaDB only end the connection then."""
    try:
        yield
    except DBAPIError as error:
        largest = max((message.size for message in messages), default=0)
        if db.dialect.name not in ("mysql", "mariadb") or largest < _SUSPECT_BYTES:
            raise
        try:
            with db.engine.connect() as other:
                most = int(other.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
        except DBAPIError:
            raise error from None  # it is down indeed
        if largest <= most - _SPARE_BYTES:
            raise
        raise MessageTooLarge(
            largest, most, "an event (max_allowed_packet of the server)"
        ) from error


if TYPE_CHECKING:
    Sync = Session | scoped_session[Any] | Connection
    Async = AsyncSession | async_scoped_session[Any] | AsyncConnection

Statement = TypeVar("Statement", bound="UpdateBase")
BOUND = {"clause": insert(outbox)}
"""What a session of several databases is asked by: the one that holds the outbox."""
_ATTACHED = ("aggregatetype", "aggregateid", "type", "shard")
_NOTHING: ColumnClause[Any] = column("nothing")  # a CTE of text must name what it returns
_ALONE = "holdfast_commits_by_itself"
_TEXT, _BYTES = Text(), LargeBinary()


class Outbox:
    """Writes events next to the caller's own rows; a relay publishes them after the commit.

    With *ordered*, writers of one key take turns until they commit, so that the order of
    events is the order of commits even where the application itself does not lock the
    entity first. It costs a round trip on PostgreSQL; SQLite orders writers anyway. With a
    *lineage* it is written down, in the same transaction, what each event came of.
    """

    def __init__(
        self,
        *,
        source: str = "holdfast",
        codec: Codec | None = None,
        ordered: bool = False,
        lineage: Lineage | None = None,
    ) -> None:
        if not isinstance(source, str) or not source:
            raise ConfigurationError(
                f"Outbox(source={source!r}): name the service that events come from, e.g. 'shop'"
            )
        self._source = source
        self._codec = JsonCodec() if codec is None else codec
        self._ordered = ordered
        self._lineage = lineage

    @overload
    def add(
        self, session: Sync, event: Any, *, topic: str, **options: Unpack[Options]
    ) -> Message: ...
    @overload
    def add(
        self, session: Async, event: Any, *, topic: str, **options: Unpack[Options]
    ) -> Awaitable[Message]: ...

    def add(
        self, session: Sync | Async, event: Any, *, topic: str, **options: Unpack[Options]
    ) -> Message | Awaitable[Message]:
        """Stage *event*; it is published if and only if the caller's transaction commits.

        Options are those of `Event`: key=, type=, headers=, delay=. An event that cannot be
        encoded fails here, in the caller, before the commit. A session is flushed first, so
        that the rows it changed are locked before the event is numbered. For an
        `AsyncSession` or `AsyncConnection` the result is to be awaited.
        """
        staged = self.add_all(session, [event_of(event, topic, options)])
        if inspect.isawaitable(staged):
            return _first(staged)
        return staged[0]

    @overload
    def add_all(self, session: Sync, events: Iterable[Event]) -> list[Message]: ...
    @overload
    def add_all(self, session: Async, events: Iterable[Event]) -> Awaitable[list[Message]]: ...

    def add_all(
        self, session: Sync | Async, events: Iterable[Event]
    ) -> list[Message] | Awaitable[list[Message]]:
        """Stage *events* in their order with one statement, under the same promise as `add`."""
        events = list(events)
        session = own_session(session)
        messages = [self._message(event) for event in events]
        delays = [None if event.delay is None else event.delay_seconds for event in events]
        work = _Work(delays, messages, ordered=self._ordered, lineage=self._lineage)
        if hasattr(session, "run_sync"):
            return staged_async(session, work.run, messages)
        work.run(session)
        return messages

    def message(self, event: Event) -> Message:
        """Return what *event* would be published as, caused by what is handled now.

        Nothing is staged: `stage` does that, later and for many, whatever is handled then.
        """
        if event.delay is not None:
            raise ConfigurationError("message() takes no delay: use add()")
        return self._message(event)

    def stage(self, db: Connection, messages: Sequence[Message]) -> None:
        """Stage what `message` gave, with one statement, under the same promise as `add`."""
        if messages:
            now: list[float | None] = [None] * len(messages)
            _Work(now, list(messages), ordered=self._ordered, lineage=self._lineage).run(db)

    def attach(
        self, statement: Statement, event: Any, *, topic: str, **options: Unpack[Options]
    ) -> Statement:
        """Return *statement* (INSERT, UPDATE or DELETE) with *event* staged by it: PostgreSQL only.

        One statement and one round trip instead of two, under the same promise as `add`.
        The event is staged whether or not the statement finds rows to change. Few parameters,
        for each costs SQLAlchemy much time; the headers apart, for PostgreSQL takes no JSON
        apart that holds a zero character.
        """
        wanted = event_of(event, topic, options)
        if wanted.delay is not None or self._ordered or self._lineage is not None:
            raise ConfigurationError(
                "attach() takes no delay, no ordered=True and no lineage: use add()"
            )
        row = values(self._message(wanted))
        event_ = _json([str(row["id"]), *(row[name] for name in _ATTACHED)]).decode()
        # Parameters made here: values alone would cost SQLAlchemy five times as much.
        staging = statements("holdfast.outbox", "postgresql")["attach"].bindparams(
            bindparam("holdfast_event", event_, type_=_TEXT),
            bindparam("holdfast_headers", _json(row["headers"]).decode(), type_=_TEXT),
            bindparam("holdfast_payload", row["payload"], type_=_BYTES),
        )
        return statement.add_cte(staging.columns(_NOTHING).cte("holdfast_event"))

    def _message(self, event: Event) -> Message:
        type_ = _type_of(event.body) if event.type is None else event.type
        if switch.spans is None:
            return self._created(event, type_)
        with switch.spans.create(event.topic, type_) as span:
            message = self._created(event, type_)
            span.set_attribute("messaging.message.id", message.id)
            return message

    def _created(self, event: Event, type_: str) -> Message:
        payload, content_type = self._codec.encode(event.body)
        message = Message.new(
            event.topic,
            payload,
            key=event.key_text,
            type=type_,
            source=self._source,
            headers=event.headers,
            content_type=content_type,
        )
        return message if self._lineage is None else self._lineage.followed(message)


@dataclass(frozen=True, slots=True)
class _Work:
    """The statements of one `add_all`, ready to run on a connection of either colour."""

    delays: list[float | None]
    messages: list[Message]
    ordered: bool
    lineage: Lineage | None

    def run(self, session: Any) -> None:
        """Lock the keys where asked, then insert what is due and what is delayed."""
        db = _flushed(session) if hasattr(session, "get_bind") else session
        dialect, messages = db.dialect.name, self.messages
        require_transaction(db)
        several = len(messages) > 1 or (self.lineage is not None and len(messages) == 1)
        at_once = several and dialect == "postgresql" and self.delays.count(None) == len(messages)
        rows: list[Any] = [fields(one) if at_once else values(one) for one in messages]
        if self.ordered:
            _take_turns(db, dialect, messages)
        with too_large_told(db, messages):
            if at_once:
                with suppress(Inseparable):
                    insert_messages(db, messages, rows, self.lineage)
                    return
                rows = [values(one) for one in messages]
            self._insert(db, dialect, rows)
            if self.lineage is not None:
                self.lineage.published(db, messages)

    def _insert(self, db: Connection, dialect: str, rows: list[dict[str, Any]]) -> None:
        delays = self.delays
        if now := [row for row, delay in zip(rows, delays, strict=True) if delay is None]:
            insert_all(db, outbox, now)
        if len(now) < len(rows):
            clock = float(db.execute(statements("holdfast.outbox", dialect)["now"]).scalar_one())
            later = [
                {**row, "due": clock + delay}
                for row, delay in zip(rows, delays, strict=True)
                if delay is not None
            ]
            insert_all(db, delayed, later)


def _flushed(session: Session) -> Connection:
    """Return the session's connection, with what the caller changed already sent to it.

    The lock of a changed row is then held before its event gets a number; a flush at the
    commit would come too late for that. Within a flush, as in a session's event hooks, there
    is nothing to be done.
    """
    if not session._flushing:  # nothing public tells, and flush() would raise
        session.flush()
    return session.connection(bind_arguments=BOUND)


def _take_turns(db: Connection, dialect: str, messages: Sequence[Message]) -> None:
    if dialect == "sqlite":
        return  # one writer at a time, from its first statement to its commit
    if dialect != "postgresql":
        raise ConfigurationError(
            f"ordered=True is not to be had on {dialect}: lock the entity's row with "
            "SELECT … FOR UPDATE before adding its event, which gives the same order"
        )
    lock = statements("holdfast.outbox", dialect)["key_lock"]
    keys = {f"{message.topic}/{message.key_text}" for message in messages if message.key}
    for key in sorted(keys):  # sorted: two writers never wait for each other
        db.execute(lock, {"key": key})


def own_session(session: Any) -> Any:
    """Return *session*, or the one of this thread or task that it stands for.

    What is no session or connection, an engine say, is refused.
    """
    if (registry := getattr(session, "registry", None)) is not None:  # a scoped_session
        session = registry()
    if not any(hasattr(session, name) for name in ("get_bind", "in_transaction")):
        raise ConfigurationError(
            f"an event cannot be added to a {type(session).__name__}: pass the Session or "
            "Connection whose transaction it belongs to, e.g.  with engine.begin() as db:"
        )
    return session


def require_transaction(db: Connection) -> None:
    """Refuse a connection that commits each statement: the event would not share your fate."""
    level = db.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(db.dialect, "_on_connect_isolation_level", None)  # create_engine's option
    if level == "AUTOCOMMIT" or (level is None and _commits_by_itself(db)):
        raise ConfigurationError(
            "the connection is in AUTOCOMMIT: the event would be published even if your own "
            "work fails; use a transaction, e.g.  with engine.begin() as db:"
        )


def _commits_by_itself(db: Connection) -> bool:
    """Whether the driver was told to commit each statement."""
    if db.dialect.name == "sqlite":
        own: Any = db.connection.driver_connection
        return own.isolation_level is None and not own.in_transaction
    info = db.info  # of the driver's connection: it is asked once
    known: bool | None = info.get(_ALONE)
    if known is None:
        raw: Any = db.connection.dbapi_connection
        asked = getattr(raw, "get_autocommit", None)  # of MySQL's drivers
        known = info[_ALONE] = bool(asked()) if asked else getattr(raw, "autocommit", None) is True
    return known


async def _first(staged: Awaitable[list[Message]]) -> Message:
    return (await staged)[0]


def _type_of(event: Any) -> str:
    return "message" if isinstance(event, dict | list | bytes | str) else type(event).__name__
