"""What a handler is given: a transaction that is not its own to end, and what it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
import tenacity
from sqlalchemy import event, text
from sqlalchemy.engine import Connection  # noqa: TC002 - a handler asks for it
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession  # noqa: TC002 - handlers ask for it
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from holdfast import Message
from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, circuit
from holdfast.consumer import Attempt, HandlerEnding
from holdfast.consumer.attempt.transaction import HandlerSession, TransactionNotYours
from holdfast.consumer.handlers.arguments import wanted_by
from holdfast.db.errors import DatabaseDown
from holdfast.dlq import dead_letter
from holdfast.dlq.store.schema import overtaken
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.idempotency import DatabaseLeases, idempotency_key, idempotent
from holdfast.idempotency.schema import inbox
from holdfast.outbox import Outbox  # noqa: TC001 - handlers ask for it by annotation
from holdfast.retry import Backoff, Jitter, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import MariaDB, Postgres

REFUSED = tenacity.retry_if_result(lambda result: result is None)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker, and a database of each kind."""
    kind = request.param
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    url = f"sqlite:///{tmp_path}/db.db" if server is None else server.database("sessions")
    bench = Bench(tmp_path, url)
    yield bench
    bench.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/db.db")
    yield bench
    bench.close()


@pytest.fixture
def on_postgres(postgres: Postgres, tmp_path: Path) -> Iterator[Bench]:
    """Offer a database with an async driver, where claims may hope."""
    bench = Bench(tmp_path, postgres.database("sessions"))
    yield bench
    bench.close()


def swallowed(session: Session) -> None:
    """Go on as if nothing were."""
    try:
        session.connection().commit()
    except TransactionNotYours:
        return


WAYS: dict[str, Callable[[Session], object]] = {
    "connection": lambda session: session.connection().commit(),
    "transaction": lambda session: session.get_transaction().commit(),  # type: ignore[union-attr]
    "statement": lambda session: session.execute(text("COMMIT")),
    "driver statement": lambda session: session.connection().exec_driver_sql("/* so */ commit;"),
    "two statements": lambda session: session.execute(text("SELECT 1; COMMIT")),
    "back": lambda session: session.execute(text("ROLLBACK")),
    "rolled back": lambda session: session.connection().rollback(),
    "begun": lambda session: session.begin().__enter__(),
    "reset": lambda session: session.reset(),
    "invalidate": lambda session: session.invalidate(),
    "swallowed": swallowed,
}


@pytest.mark.parametrize("fails", [True, False])
def test_a_handler_cannot_end_its_transaction_by_the_back_door(bench: Bench, fails: bool) -> None:
    """Whatever it calls, and however it goes on: nothing is committed, and nothing is lost."""
    consumer = bench.consumer()
    ways = dict(WAYS)

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        if order in ways:
            ways[order](session)
            if fails:
                raise ConnectionError("after its own commit")

    handler = consumer.handler("orders")
    for way in WAYS:
        message = Message.new("orders", way.encode())
        outcomes = [handler.handle(message) for _ in range(2)]
        assert [one.ending for one in outcomes] == [HandlerEnding.FAILED] * 2, way
        assert bench.effects == [], way
        ways.pop(way)
        assert handler.handle(message).ending is HandlerEnding.HANDLED, way
        assert bench.effects == [way]
        with bench.engine.begin() as db:
            db.execute(text("DELETE FROM effects"))


def test_a_handler_that_begins_a_transaction_hears_what_to_write_instead(small: Bench) -> None:
    """`with session.begin()` is a habit; nobody is dead-lettered for it."""
    consumer = small.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, attempts=2))
    def handle(order: str, session: Session) -> None:
        with session.begin():
            small.note(session, order)

    outcome = consumer.handler("orders").handle(Message.new("orders", b"x"))
    assert isinstance(outcome.error, TransactionNotYours)
    assert outcome.error.verb == "session.begin()"
    assert "session.begin_nested()" in str(outcome.error)
    assert small.letters == []


KILLS = {
    "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"),
    "mysql": ("SELECT CONNECTION_ID()", "KILL {}"),
    "mariadb": ("SELECT CONNECTION_ID()", "KILL {}"),
}


@pytest.mark.parametrize("at", ["failure", "commit", "statement"])
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_connection_that_dies_under_a_handler_is_nobodys_fault(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, at: str
) -> None:
    """Whatever the handler does next: it is an outage, no failed attempt, and it comes again."""
    bench = Bench(tmp_path, request.getfixturevalue(kind).database("dying"))
    consumer, kills = bench.consumer(), [1]

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, attempts=2))
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        if not kills:
            return
        kills.pop()
        mine, kill = KILLS[bench.engine.dialect.name]
        number = session.execute(text(mine)).scalar_one()
        with bench.engine.connect() as other:
            other.execute(text(kill.format(number)))
        if at == "failure":
            raise PoisonMessage("looks like poison, but nothing can be written about it here")
        if at == "statement":
            bench.note(session, "never")

    handler, message = consumer.handler("orders"), Message.new("orders", b"x")
    outcome = handler.handle(message)
    assert outcome.ending is HandlerEnding.RELEASED, outcome
    assert isinstance(outcome.error, DatabaseDown)
    assert handler.handle(message).ending is HandlerEnding.HANDLED
    assert bench.effects == ["x"]
    assert bench.attempts == bench.letters == []
    bench.close()


def test_what_commits_in_passing_is_refused_on_mariadb(tmp_path: Path, mariadb: MariaDB) -> None:
    """A CREATE TABLE there would commit the claim of a message that may fail yet."""
    bench = Bench(tmp_path, mariadb.database("sessions"))
    consumer = bench.consumer()

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        session.execute(text("CREATE TEMPORARY TABLE IF NOT EXISTS mine (id int)"))
        session.execute(text("CREATE TABLE IF NOT EXISTS ours (id int)"))

    outcome = consumer.handler("orders").handle(Message.new("orders", b"x"))
    assert isinstance(outcome.error, TransactionNotYours)
    assert outcome.error.verb == "CREATE"
    bench.close()


def test_a_savepoint_of_the_handlers_own_is_its_own(bench: Bench) -> None:
    """It may fail and be rolled back; statements that say so in so many words, too."""
    consumer = bench.consumer()

    @consumer.on("orders")
    @idempotent
    def handle(order: str, session: Session) -> None:
        session.execute(text("SAVEPOINT mine"))
        bench.note(session, "never")
        session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        with session.begin_nested() as part:
            bench.note(session, "neither")
            part.rollback()
        bench.note(session, "COMMIT; ROLLBACK")

    assert consumer.handler("orders").handle(Message.new("orders", b"x")).acknowledge
    assert bench.effects == ["COMMIT; ROLLBACK"]


def test_an_async_handler_cannot_end_its_transaction(on_postgres: Bench) -> None:
    """The guard stands on the connection, whatever colour the session has."""
    consumer = on_postgres.consumer()

    @consumer.on("orders")
    @idempotent
    async def handle(order: str, session: AsyncSession) -> None:
        await (await session.connection()).commit()

    on_postgres.publish("x")
    with running(consumer):
        until(lambda: consumer.tally.failed > 0, "it fails")
        assert on_postgres._rows(inbox) == []
    assert "TransactionNotYours" in on_postgres.attempts[0].last_error


def test_a_batch_cannot_be_committed_by_one_of_its_messages(bench: Bench) -> None:
    """Its message fails by itself, the others are handled."""
    consumer = bench.consumer(backoff=Backoff(first=0.02, ceiling=0.05))

    @consumer.on("orders", batch=10)
    @idempotent
    def handle(order: str, session: Session) -> None:
        bench.note(session, order)
        if order == "bad":
            session.connection().commit()

    for key in ("good", "bad", "fine"):
        bench.publish(key, key=key)
    with running(consumer):
        until(lambda: sorted(bench.effects) == ["fine", "good"], "the others are handled")
        until(lambda: consumer.tally.failed > 0, "the bad one fails")
    assert "TransactionNotYours" in bench.attempts[0].last_error


@pytest.mark.parametrize("batch", [None, 10])
def test_a_refused_result_commits_nothing(small: Bench, batch: int | None) -> None:
    """It is a failed attempt: counted, tried again, and the breaker heard of an answer."""
    breaker = Breaker("bank", CircuitPolicy(minimum_calls=2, window=LastCalls(4)))
    consumer = small.consumer()
    calls: list[Attempt] = []

    @consumer.on("orders", batch=batch)
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=9), on=REFUSED)
    @circuit("bank", breaker=breaker)
    @idempotent
    def handle(order: str, session: Session, attempt: Attempt) -> str | None:
        calls.append(attempt)
        small.note(session, f"{len(calls)}")
        return None if len(calls) < 4 else "good"

    small.publish("x")
    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "the good result")
    assert (small.effects, small.letters, consumer.tally.duplicates) == (["4"], [], 0)
    assert breaker.state.window.failed == 0  # type: ignore[union-attr]
    assert [one.number for one in calls][-2:] == ([3, 4] if batch is None else [1, 2])


def test_a_result_that_stays_refused_is_dead_lettered_with_no_effect(small: Bench) -> None:
    """And not remembered as handled, so that its replay runs."""
    consumer = small.consumer()

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.01, attempts=2), on=REFUSED)
    @idempotent(lease="30s")
    def handle(order: str, session: Session) -> None:
        small.note(session, order)

    outcome = consumer.handler("orders").handle(Message.new("orders", b"x", key="k"))
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert (small.effects, small._rows(inbox)) == ([], [])
    assert "ResultRejected" in small.letters[0].error_type


@pytest.mark.parametrize("lease", [None, "30s"])
def test_the_idempotency_key_is_that_of_the_users_key(small: Bench, lease: str | None) -> None:
    """Two deliveries of one order are one charge to the bank, whatever their ids."""
    consumer, keys = small.consumer(), []
    store = None if lease is None else DatabaseLeases(small.engine)

    @consumer.on("orders")
    @idempotent(key=lambda order: order["number"], lease=lease, store=store)
    def charge(order: dict[str, str], attempt: Attempt) -> None:
        keys.append(attempt.idempotency_key)
        raise ConnectionError("down")

    handler = consumer.handler("orders")
    for number in ("7", "7", "8"):
        handler.handle(Message.new("orders", b'{"number": "%s"}' % number.encode()))
    assert keys[0] == keys[1] != keys[2]


def test_a_batch_has_the_same_idempotency_keys(small: Bench) -> None:
    """The key of a message does not tell how it was handled."""
    consumer, keys = small.consumer(), []

    @consumer.on("orders", batch=10)
    @idempotent(key=lambda order: order["number"])
    def charge(order: dict[str, str], attempt: Attempt) -> None:
        keys.append(attempt.idempotency_key)
        if len(keys) == 1:
            raise ConnectionError("down")

    small.publish({"number": "7"})
    with running(consumer):
        until(lambda: consumer.tally.handled == 1, "it is handled")
    assert len(keys) > 1
    assert set(keys) == {idempotency_key(consumer._routes["orders"].consumer, "7")}


@pytest.mark.parametrize("batch", [None, 10])
def test_a_duplicate_overtakes_no_dead_letter(small: Bench, batch: int | None) -> None:
    """It was handled before the one that died, and only came again."""
    consumer = small.consumer(quarantine=False)

    @consumer.on("orders", batch=batch)
    @dead_letter()
    @idempotent
    def handle(order: str, session: Session) -> None:
        if order == "bad":
            raise PoisonMessage("bad for ever")

    first, bad = Message.new("orders", b"first", key="k"), Message.new("orders", b"bad", key="k")
    with running(consumer):
        small.send(first)
        until(lambda: consumer.tally.handled == 1, "handled")
        small.send(bad)
        until(lambda: consumer.tally.dead_lettered == 1, "dead")
        small.send(first)
        until(lambda: consumer.tally.duplicates == 1, "it came again")
    assert small._rows(overtaken) == []
    loop = consumer.handler("orders")
    assert loop.handle(first).ending is HandlerEnding.DUPLICATE
    assert small._rows(overtaken) == []


def test_batches_learn_that_duplicates_are_about(on_postgres: Bench) -> None:
    """A claim that hopes in vain costs a transaction: once, not for each batch."""
    consumer = on_postgres.consumer(workers=1)
    broken: list[object] = []

    @event.listens_for(on_postgres.engine, "handle_error")
    def failed(context: Any) -> None:
        if isinstance(context.sqlalchemy_exception, IntegrityError):
            broken.append(context.statement)

    @consumer.on("orders", batch=2)
    @idempotent
    def handle(order: str, session: Session) -> None: ...

    messages = [Message.new("orders", b"x", key=f"{n}") for n in range(6)]
    with running(consumer):
        on_postgres.send(*messages)
        until(lambda: consumer.tally.handled == 6, "handled")
        on_postgres.send(*messages)
        until(lambda: consumer.tally.duplicates == 6, "absorbed")
    assert len(broken) == 1


@pytest.mark.parametrize("stop", [{"deadline": 1.0}, {"stop": tenacity.stop_after_delay(1.0)}])
def test_a_deadline_bounds_the_retries_that_wait_in_the_database(
    small: Bench, stop: dict[str, Any]
) -> None:
    """It goes on from the first failure, though each wait ends the run."""
    consumer = small.consumer(patience=0.01, outage_after=None)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.05, ceiling=0.05, jitter=Jitter.NONE), **stop)
    def handle(order: str) -> None:
        raise ConnectionError("down")

    tally, sent = consumer.tally, 0
    with running(consumer):
        while sent < 30 and not tally.parked:  # on a slow machine the first run may take it all
            sent += 1
            small.publish("x", key=f"k{sent}")
            until(lambda sent=sent: tally.dead_lettered == sent, "its time is over")  # type: ignore[misc]
    assert tally.parked > 0


def named_session() -> type[Any]:
    """Return a class of the same name as another, as `requests.Session` is."""
    return type("Session", (), {"__module__": "requests.sessions"})


HttpSession: Any = named_session()


def test_what_a_handler_asks_for_goes_by_class() -> None:
    """A foreign class with a default is the user's own, an optional one of ours is handed over."""

    def asks(
        order: str,
        db: Optional[Session] = None,  # noqa: UP045 - written so in old code
        box: Outbox | None = None,
        own: Annotated[HandlerSession, "mine"] = None,  # type: ignore[assignment]
        http: HttpSession = None,
        message: str = "mine",
        attempt: Any = None,
        number: int | None = None,
    ) -> None: ...

    expected = {"db": "session", "box": "outbox", "own": "session", "attempt": "attempt"}
    assert wanted_by(asks) == expected


def test_what_a_handler_asks_for_as_something_else_is_refused() -> None:
    """It would be handed an object of another class than its author counts on."""

    def counted(order: str, attempt: int) -> None: ...

    def connected(order: str, session: Connection) -> None: ...

    def turned(session: Session, order: str) -> None: ...

    for wrong, fix in (
        (counted, "annotate it as Attempt"),
        (connected, "annotate it as Session or AsyncSession"),
        (turned, "its first parameter is the payload"),
    ):
        with pytest.raises(ConfigurationError, match=fix):
            wanted_by(wrong)


def test_a_name_that_only_type_checkers_import_is_understood() -> None:
    """As long as it can be nothing else."""

    def asks(order: str, one: Any, two: Any, http: Any = None) -> None: ...

    asks.__annotations__ |= {"one": "orm.Session", "two": "Attempt | None", "http": "r.Session"}
    assert wanted_by(asks) == {"one": "session", "two": "attempt"}
