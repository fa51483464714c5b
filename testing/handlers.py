"""Handlers under test: no broker, no waiting, and what came of each message.

`Consumer.for_test()` returns a `ConsumerTest`. The handlers, their decorators and their order are
those of the consumer. Everything around them belongs to the test: an embedded broker, a database, a
clock whose waits take no time, and circuits that no other test knows.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, overload

import msgspec
from sqlalchemy import MetaData, select
from sqlalchemy.orm import Session

from holdfast import outbox, tracing
from holdfast.brokers import connect
from holdfast.circuit import Breaker, Circuit
from holdfast.cloudevents import from_wire
from holdfast.codec import JsonCodec, payload_annotation
from holdfast.consumer.scheduling.work import HandlerEnding
from holdfast.consumer.schema import create_tables
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetters, DeadLetterStore, dlq_topic
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.topic.topic import from_topic
from holdfast.effects import suppressed
from holdfast.errors import ConfigurationError
from holdfast.idempotency.leased import Leased
from holdfast.message import Message
from holdfast.outbox.schema import delayed
from holdfast.outbox.schema import outbox as staged
from holdfast.pipeline import Handler
from holdfast.stored_message import StoredMessage
from holdfast.testing.clock import START, VirtualClock

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator

    from sqlalchemy.engine import Connection, Engine

    from holdfast.consumer import Consumer
    from holdfast.consumer.attempt.outcome import HandlerOutcome
    from holdfast.dlq import DeadLetter
    from holdfast.headers import HeaderInput
    from holdfast.layer import Layer

T = TypeVar("T")
Rows = dict[str, list[dict[str, Any]]]
"""Rows by the name of their table."""

_CODEC = JsonCodec()


class WaitlessClock(VirtualClock):
    """A clock on which a handler's waits are over at once, and are written down."""

    def __init__(self) -> None:
        super().__init__(auto=True)
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Move the clock by *seconds*."""
        self.waits.append(seconds)
        super().sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        """Move the clock by *seconds*."""
        self.waits.append(seconds)
        await super().sleep_async(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait in real time: whoever waits for an event stands beside the handler."""
        return event.wait(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What came of one delivery of a message."""

    message: Message
    ending: HandlerEnding
    """How it ended: HANDLED, DUPLICATE, DEAD_LETTERED, FAILED, RELEASED, …"""
    error: BaseException | None = None
    """Why, where it did not end well."""
    attempts: int = 0
    """How often the function was called."""
    errors: list[BaseException] = field(default_factory=list)
    """What its attempts raised."""
    waits: list[float] = field(default_factory=list)
    """The seconds between the attempts."""
    written: Rows = field(default_factory=dict)
    """Rows that are new, or were changed to this; only tables of your own."""
    removed: Rows = field(default_factory=dict)
    """Rows that are gone, or were this before a change."""
    emitted: list[Message] = field(default_factory=list)
    """The events that it added to the outbox."""
    dead_letter: DeadLetter | None = None
    """What an operator would see of it."""
    effects: list[str] = field(default_factory=list)
    """The functions marked `@effect` that would have been called."""

    @overload
    def expect_event(
        self, kind: type[T], *, topic: str | None = None, key: str | None = None, **values: Any
    ) -> T: ...
    @overload
    def expect_event(
        self, kind: str, *, topic: str | None = None, key: str | None = None, **values: Any
    ) -> Any: ...

    def expect_event(
        self,
        kind: type[Any] | str,
        *,
        topic: str | None = None,
        key: str | None = None,
        **values: Any,
    ) -> Any:
        """Return the one emitted event of this *kind*, decoded; fail if there is none, or two.

        *kind* is the class of the event, or its type as a text. *topic*, *key* and *values*, its
        fields, narrow what is meant.
        """
        name = kind if isinstance(kind, str) else kind.__name__
        decode = _CODEC.decoder_for(None if isinstance(kind, str) else kind)
        found = [
            event
            for message in self.emitted
            if message.type == name
            and topic in (None, message.topic)
            and key in (None, message.key_text)
            and _has(event := decode(message.payload), values)
        ]
        if len(found) != 1:
            wanted = {"topic": topic, "key": key, **values}
            what = ", ".join(f"{one}={value!r}" for one, value in wanted.items() if value)
            raise AssertionError(
                f"{len(found)} events are {name}({what}); emitted were: "
                + ("; ".join(map(_told, self.emitted)) or "none")
            )
        return found[0]


class ConsumerTest:
    """A consumer's handlers, each message handed to them by the test.

    *database* is where they write: a URL or an engine, or else a SQLite file that goes with the
    test. Holdfast's tables are made there, and yours if you pass your *tables*. With *effects*,
    functions marked `@effect` are called; without, they are only noted.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        database: str | Engine | None = None,
        tables: MetaData | None = None,
        effects: bool = False,
    ) -> None:
        self.clock = WaitlessClock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if database is None and consumer.engine is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="holdfast-test-")
            database = f"sqlite:///{Path(self._folder.name) / 'test.db'}"
        self.engine = None if database is None else open_database(database)
        self._tables = tables
        self._effects = effects
        self._calls: list[BaseException | None] = []
        self._circuits: dict[str, Breaker] = {}
        self._annotations: dict[str, Any] = {}
        self.broker = connect("memory:", clock=self.clock)
        self.consumer = type(consumer)(
            self.broker,
            group=consumer.group,
            database=self.engine,
            settings=consumer.settings,
            clock=self.clock,
        )
        self._make_tables()
        for topic, registration in consumer.registrations.items():
            layers, function = _taken_apart(registration.function)
            self._annotations[topic] = payload_annotation(function)
            self.consumer.on(
                topic,
                name=registration.name,
                batch=registration.batch,
                ordered=registration.ordered,
            )(Handler([self._own(layer) for layer in layers], _watched(function, self._calls)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database; one that was made for the test is deleted."""
        self.broker.close()
        if self._folder is not None and self.engine is not None:
            self.engine.dispose()
            self._folder.cleanup()

    def session(self) -> Session:
        """Return a session of the test's database, to prepare rows and to look at them."""
        if self.engine is None:
            raise ConfigurationError("the consumer has no database: pass for_test(database=…)")
        return Session(self.engine)

    def circuit(self, dependency: str) -> Breaker:
        """Return the circuit of *dependency*, e.g. to `open()` it; it is this test's own."""
        if dependency not in self._circuits:
            there = ", ".join(sorted(self._circuits)) or "none"
            raise ConfigurationError(f"no handler has @circuit({dependency!r}); there are: {there}")
        return self._circuits[dependency]

    def send(
        self,
        payload: Any,
        *,
        topic: str | None = None,
        key: str | None = None,
        type: str | None = None,  # noqa: A002 - the name CloudEvents gives it
        headers: HeaderInput = (),
    ) -> Sent:
        """Hand *payload* to its handler as a message, retries included; return what came of it.

        It is an object that is encoded as the outbox encodes it, bytes that are taken as they
        are, or a `Message`: the same message again is a redelivery. *topic* may be left out
        where only one handler takes such a payload.
        """
        message = self._message(payload, topic=topic, key=key, type=type, headers=headers)
        before = self._before()
        with self._noting() as noted:
            handled = self.consumer.handler(message.topic)(message)
            outcome = asyncio.run(handled) if inspect.iscoroutine(handled) else handled
        return self._after(message, outcome, before, noted)

    async def send_async(self, payload: Any, **options: Unpack[SendOptions]) -> Sent:
        """Do what `send` does, with the same options, where an event loop runs already."""
        message = self._message(payload, **options)
        before = self._before()
        with self._noting() as noted:
            handled = self.consumer.handler(message.topic)(message)
            outcome = await handled if inspect.iscoroutine(handled) else handled
        return self._after(message, outcome, before, noted)

    def _make_tables(self) -> None:
        if self.engine is None:
            return
        create_tables(self.engine)
        outbox.create_tables(self.engine)
        tracing.create_tables(self.engine)
        if self._tables is not None:
            self._tables.create_all(self.engine)

    def _own(self, layer: Layer) -> Layer:
        """Return *layer* without anything that lies outside the test."""
        match layer:
            case DeadLetters():
                return layer.using(None)
            case Leased() if self.engine is not None and layer.settings.store is not None:
                return layer.unbound()
            case Circuit():
                own = copy.copy(layer)
                known = layer.breaker
                own.breaker = self._circuits.setdefault(
                    known.name, Breaker(known.name, known.policy, clock=self.clock)
                )
                return own
        return layer

    def _message(
        self,
        payload: Any,
        *,
        topic: str | None = None,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: HeaderInput = (),
    ) -> Message:
        if isinstance(payload, Message):
            return payload
        body, content_type = (
            (payload, None) if isinstance(payload, bytes) else _CODEC.encode(payload)
        )
        return Message.new(
            self._topic_of(payload) if topic is None else topic,
            body,
            key=key,
            type=_type_of(payload) if type is None else type,
            source="test",
            headers=headers,
            content_type=content_type,
            now=self.clock.now,
        )

    def _topic_of(self, payload: Any) -> str:
        known = self._annotations
        fitting = [topic for topic, wanted in known.items() if wanted is type(payload)]
        found = fitting or list(known)
        if len(found) != 1:
            raise ConfigurationError(
                f"a {type(payload).__name__} may be for {' or '.join(sorted(found)) or 'nobody'}: "
                "say which, send(…, topic=…)"
            )
        return found[0]

    @contextmanager
    def _noting(self) -> Iterator[list[str]]:
        """Yield where the names of effects are noted, unless they are to happen."""
        self._calls.clear()
        self.clock.waits.clear()
        if self._effects:
            yield []
            return
        with suppressed() as skipped:
            yield skipped

    def _before(self) -> _Contents:
        if self.engine is None:
            return _Contents({}, frozenset())
        with self.engine.connect() as db:
            return _Contents(self._rows(db), frozenset(row["id"] for row in _events(db)))

    def _after(
        self, message: Message, outcome: HandlerOutcome, before: _Contents, effects: list[str]
    ) -> Sent:
        rows: Rows = {}
        emitted: list[Message] = []
        if self.engine is not None:
            with self.engine.connect() as db:
                rows = self._rows(db)
                emitted = [_event(row) for row in _events(db) if row["id"] not in before.events]
        calls = list(self._calls)
        is_dead = outcome.ending is HandlerEnding.DEAD_LETTERED
        return Sent(
            message=message,
            ending=outcome.ending,
            error=outcome.error,
            attempts=len(calls),
            errors=[error for error in calls if error is not None],
            waits=list(self.clock.waits),
            written=_beyond(rows, before.rows),
            removed=_beyond(before.rows, rows),
            emitted=emitted,
            dead_letter=self._letter(message) if is_dead else None,
            effects=list(effects),
        )

    def _rows(self, db: Connection) -> Rows:
        tables = self._tables
        if tables is None:
            tables = MetaData()
            tables.reflect(db)
        return {
            name: [dict(row) for row in db.execute(select(table)).mappings()]
            for name, table in tables.tables.items()
            if not name.startswith("holdfast_")
        }

    def _letter(self, message: Message) -> DeadLetter | None:
        if self.engine is None:
            return self._letter_on_topic(message)
        wanted = select(letters.c.dlq_id).where(letters.c.message_id == message.id)
        with self.engine.connect() as db:
            found = db.execute(wanted).scalar()
        return None if found is None else DeadLetterStore(self.engine).get(found)

    def _letter_on_topic(self, message: Message) -> DeadLetter | None:
        topic = dlq_topic(message.topic, self.consumer.group)
        with closing(self.broker.source([topic], group="test")) as source:
            for delivery in source.poll(1000, 0):
                letter = from_topic(delivery.message)
                if letter.message.id == message.id:
                    return letter
        return None


class SendOptions(TypedDict, total=False):
    """What `ConsumerTest.send` takes beside the payload."""

    topic: str | None
    key: str | None
    type: str | None
    headers: HeaderInput


def assert_idempotent(test: ConsumerTest, payload: Any, **options: Unpack[SendOptions]) -> Sent:
    """Send *payload*, and the same message again: the second delivery must change nothing.

    Return what came of the first. It must have been handled; a redelivery that writes, removes or
    emits anything, or calls an `@effect`, is an `AssertionError` that says what.
    """
    first = test.send(payload, **options)
    if first.error is not None or not first.attempts:
        raise AssertionError(f"the first delivery was not handled: {first.ending}, {first.error}")
    again = test.send(first.message)
    repeated = {
        "written": again.written,
        "removed": again.removed,
        "emitted": [_told(message) for message in again.emitted],
        "effects": again.effects,
        "error": again.error,
    }
    if told := {name: value for name, value in repeated.items() if value}:
        raise AssertionError(
            f"the same message delivered twice had an effect twice: {told}. Decorate the handler "
            "with @idempotent"
        )
    return first


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is in the database: rows of the user's, and the ids of staged events."""

    rows: Rows
    events: frozenset[Any]


def _taken_apart(function: Any) -> tuple[Iterable[Layer], Callable[..., Any]]:
    """Return the layers and the function inside of a registered handler."""
    if isinstance(function, Handler):
        return function.plan.layers, function.plan.function
    inner = getattr(function, "__func__", None)
    if isinstance(function, MethodType) and isinstance(inner, Handler):
        return inner.plan.layers, MethodType(inner.plan.function, function.__self__)
    return (), function


def _watched(function: Callable[..., Any], calls: list[BaseException | None]) -> Any:
    """Return *function*, which writes into *calls* what each call raised."""
    if Handler((), function).plan.is_async:

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            try:
                return await function(*args, **kwargs)
            except BaseException as error:
                calls[-1] = error
                raise

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            calls[-1] = error
            raise

    return run


def _events(db: Connection) -> list[Any]:
    """Return the rows of the outbox, then those that are delayed."""
    return [
        row for table in (staged, delayed)
        for row in db.execute(select(table).order_by(table.c.seq)).mappings()
    ]  # fmt: skip


def _event(row: Any) -> Message:
    """Return the message that the relay would publish."""
    key = None if row["aggregateid"] is None else row["aggregateid"].encode()
    stored = StoredMessage(
        id=str(row["id"]),
        topic=row["aggregatetype"],
        payload=row["payload"],
        key=key,
        type=row["type"],
        time=START,
        packed=msgspec.json.encode(row["headers"]).decode(),
    )
    return from_wire(
        topic=stored.topic,
        key=key,
        body=stored.payload,
        headers=stored.wire,
        fallback_id=lambda: stored.id,
        fallback_time=lambda: START,
    )


def _beyond(rows: Rows, others: Rows) -> Rows:
    """Return the *rows* that are not among *others*, by table; tables without any are left out."""
    found: Rows = {}
    for name, mine in rows.items():
        theirs = list(others.get(name, ()))
        for row in mine:
            if row in theirs:
                theirs.remove(row)
            else:
                found.setdefault(name, []).append(row)
    return found


def _has(event: Any, values: dict[str, Any]) -> bool:
    for name, value in values.items():
        own = event.get(name) if isinstance(event, dict) else getattr(event, name, None)
        if own != value:
            return False
    return True


def _told(message: Message) -> str:
    body = (message.payload or b"")[:200].decode(errors="replace")
    return f"{message.type} on {message.topic} with key {message.key_text}: {body}"


def _type_of(payload: Any) -> str:
    plain = isinstance(payload, dict | list | bytes | str)
    return "message" if plain else type(payload).__name__
