"""Staging events in the caller's own transaction."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import insert

from holdfast.codec import JsonCodec
from holdfast.errors import ConfigurationError, InvalidMessage
from holdfast.message import Message
from holdfast.outbox.rows import refuse_halves, values
from holdfast.outbox.schema import delayed, outbox
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session
    from sqlalchemy.sql.dml import UpdateBase

    from holdfast.codec import Codec
    from holdfast.headers import HeaderInput

    Sync = Session | Connection
    Async = AsyncSession | AsyncConnection

_INSERT = insert(outbox)
Statement = TypeVar("Statement", bound="UpdateBase")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event to stage, with where it goes; for `Outbox.add_all`."""

    body: Any
    topic: str
    key: str | bytes | None = None
    type: str | None = None
    headers: HeaderInput = ()
    delay: float | None = None


class Outbox:
    """Writes events next to the caller's own rows; a relay publishes them after the commit.

    With *ordered*, writers of one key take turns until they commit, so that the order of
    events is the order of commits even where the application itself does not lock the
    entity first. It costs a round trip on PostgreSQL; SQLite orders writers anyway.
    """

    def __init__(
        self, *, source: str = "holdfast", codec: Codec | None = None, ordered: bool = False
    ) -> None:
        self._source = source
        self._codec = JsonCodec() if codec is None else codec
        self._ordered = ordered

    @overload
    def add(self, session: Sync, event: Any, *, topic: str, **options: Any) -> Message: ...
    @overload
    def add(
        self, session: Async, event: Any, *, topic: str, **options: Any
    ) -> Awaitable[Message]: ...

    def add(
        self, session: Sync | Async, event: Any, *, topic: str, **options: Any
    ) -> Message | Awaitable[Message]:
        """Stage *event*; it is published if and only if the caller's transaction commits.

        Options are those of `Event`: key=, type=, headers=, delay= (seconds). An event that
        cannot be encoded fails here, in the caller, before the commit. For an `AsyncSession`
        or `AsyncConnection` the result is to be awaited.
        """
        staged = self.add_all(session, [_event(event, topic, options)])
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
        messages = [self._message(event) for event in events]
        work = _Work(events, messages, ordered=self._ordered)
        if hasattr(session, "run_sync"):
            return _staged_async(session, work)
        work.run(session)
        return messages

    def attach(self, statement: Statement, event: Any, *, topic: str, **options: Any) -> Statement:
        """Return *statement* (INSERT, UPDATE or DELETE) with *event* staged by it: PostgreSQL only.

        One statement and one round trip instead of two, under the same promise as `add`.
        The event is staged whether or not the statement finds rows to change.
        """
        wanted = _event(event, topic, options)
        if wanted.delay is not None or self._ordered:
            raise ConfigurationError("attach() takes no delay and no ordered=True: use add()")
        staging = insert(outbox).values(values(self._message(wanted)))
        return statement.add_cte(staging.cte("holdfast_event"))

    def _message(self, event: Event) -> Message:
        delay = event.delay
        if delay is not None and not (isinstance(delay, (int, float)) and 0 <= delay < math.inf):
            raise InvalidMessage(f"delay={delay!r}: use a number of seconds, 0 or more, or None")
        payload, content_type = self._codec.encode(event.body)
        return Message.new(
            event.topic,
            payload,
            key=_key(event.key),
            type=_type_of(event.body) if event.type is None else event.type,
            source=self._source,
            headers=event.headers,
            content_type=content_type,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """The statements of one `add_all`, ready to run on a connection of either colour."""

    events: list[Event]
    messages: list[Message]
    ordered: bool

    def run(self, session: Any) -> None:
        """Lock the keys where asked, then insert what is due and what is delayed."""
        db = connection_of(session)
        dialect = db.dialect.name
        rows = [values(message) for message in self.messages]
        if self.ordered:
            _take_turns(db, dialect, rows)
        now = [row for row, event in zip(rows, self.events, strict=True) if event.delay is None]
        if now:
            db.execute(insert(outbox), now)
        if len(now) < len(rows):
            clock = float(db.execute(statements("holdfast.outbox", dialect)["now"]).scalar_one())
            later = [
                {**row, "due": clock + event.delay}
                for row, event in zip(rows, self.events, strict=True)
                if event.delay is not None
            ]
            db.execute(insert(delayed), later)


def _take_turns(db: Connection, dialect: str, rows: list[dict[str, Any]]) -> None:
    if dialect == "sqlite":
        return  # one writer at a time, from its first statement to its commit
    if dialect != "postgresql":
        raise ConfigurationError(
            f"ordered=True is not to be had on {dialect}: lock the entity's row with "
            "SELECT … FOR UPDATE before adding its event, which gives the same order"
        )
    lock = statements("holdfast.outbox", dialect)["key_lock"]
    keys = {f"{row['aggregatetype']}/{row['aggregateid']}" for row in rows if row["aggregateid"]}
    for key in sorted(keys):  # sorted: two writers never wait for each other
        db.execute(lock, {"key": key})


async def _staged_async(session: Any, work: _Work) -> list[Message]:
    await session.run_sync(work.run)
    return work.messages


async def _first(staged: Awaitable[list[Message]]) -> Message:
    return (await staged)[0]


def _key(key: object) -> str | bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    text = str(key)
    if not text.isascii():
        refuse_halves("key", text)
    return text


def _event(body: object, topic: str, options: dict[str, Any]) -> Event:
    unknown = options.keys() - {"key", "type", "headers", "delay"}
    if unknown:
        raise ConfigurationError(
            f"{', '.join(sorted(unknown))} is no option of an event: use key, type, headers, delay"
        )
    return Event(body=body, topic=topic, **options)


def connection_of(session: Any) -> Connection:
    """Return the connection of *session*; one without a transaction is refused.

    The event must live and die with the caller's own rows.
    """
    if not hasattr(session, "execute") or not hasattr(session, "in_transaction"):
        raise ConfigurationError(
            f"{type(session).__name__} has no transaction: pass the Session or Connection "
            "in which your own rows are written"
        )
    connection: Connection = session
    if hasattr(session, "get_bind"):  # of several databases, the one that has the outbox
        connection = session.connection(bind_arguments={"clause": _INSERT})
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    if level == "AUTOCOMMIT":
        raise ConfigurationError(
            "the connection is in AUTOCOMMIT: the event would be published whatever becomes of "
            "your transaction; use an engine or connection without isolation_level=AUTOCOMMIT"
        )
    return connection


def _type_of(event: Any) -> str:
    return "message" if isinstance(event, dict | list | bytes | str) else type(event).__name__
