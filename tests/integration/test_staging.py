"""Events are staged in the caller's transaction, of every kind."""

from __future__ import annotations

import asyncio
import threading
import uuid
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from holdfast import ConfigurationError, InvalidMessage, Message, handling
from holdfast.db.engine import open_database
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.rows import shard_of
from holdfast.outbox.schema import SHARDS, delayed, outbox
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine

    from tests.servers import MariaDB, Postgres

tables = MetaData()
orders = Table("staged_orders", tables, Column("id", Integer, primary_key=True))


class Base(DeclarativeBase):
    metadata = tables


class Shipment(Base):
    __tablename__ = "staged_shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str | None] = mapped_column(String(20))


class OrderPlaced(msgspec.Struct):
    order_id: int


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Return an engine on a fresh database with the outbox tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("staging")
    engine = open_database(url)
    create_tables(engine)
    tables.create_all(engine)
    yield engine
    engine.dispose()


def staged(engine: Engine) -> int:
    """Return how many events are in the outbox."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(outbox)).scalar_one()


def test_an_event_exists_if_and_only_if_its_transaction_committed(engine: Engine) -> None:
    """Order and event commit together, or both are gone."""
    with Session(engine) as session, session.begin():
        session.execute(insert(orders).values(id=1))
        Outbox().add(session, OrderPlaced(1), topic="orders", key="1")
    with Session(engine) as session:
        session.execute(insert(orders).values(id=2))
        Outbox().add(session, OrderPlaced(2), topic="orders", key="2")
        session.rollback()
    with engine.begin() as connection:
        Outbox().add(connection, OrderPlaced(3), topic="orders", key="3")
    with pytest.raises(RuntimeError):
        _fail_after_adding(engine)
    with engine.connect() as db:
        keys = db.execute(select(outbox.c.aggregateid).order_by(outbox.c.seq)).scalars().all()
    assert keys == ["1", "3"]


def _fail_after_adding(engine: Engine) -> None:
    with engine.begin() as connection:
        Outbox().add(connection, OrderPlaced(4), topic="orders", key="4")
        raise RuntimeError("the service fails")


def test_an_event_that_cannot_be_encoded_fails_in_the_caller(engine: Engine) -> None:
    """Nothing is staged, and the caller hears of it before its commit."""
    with Session(engine) as session, pytest.raises(InvalidMessage):
        Outbox().add(session, {"when": object()}, topic="orders")
    assert staged(engine) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": ""}, "topic is empty"),
        ({"topic": "t" * 300}, "longer than 255"),
        ({"topic": "t", "key": "k" * 300}, "longer than 255"),
        ({"topic": "t", "headers": {"bad name": "x"}}, "without space"),
        ({"topic": "t", "delay": -1}, "0 to a century"),
        ({"topic": "t", "delay": float("inf")}, "0 to a century"),
        ({"topic": "t", "delay": "3"}, "use a timedelta or a number"),
        ({"topic": "t", "key": "a\x00b"}, "zero character"),
        ({"topic": "t", "key": "\ud800"}, "lone surrogate"),
        ({"topic": "t\ud800"}, "lone surrogate"),
        ({"topic": "t", "key": b"\xff"}, "is not text"),
        ({"topic": "t", "key": 1.5}, "key is a float"),
    ],
)
def test_bad_input_is_refused_with_the_fix(
    engine: Engine, options: dict[str, Any], words: str
) -> None:
    """The error names the field; the transaction stays usable."""
    with Session(engine) as session, session.begin():
        with pytest.raises(InvalidMessage, match=words):
            Outbox().add(session, {"n": 1}, **options)
        Outbox().add(session, {"n": 2}, topic="fine")
    assert staged(engine) == 1


def test_a_key_is_the_same_however_it_is_given(engine: Engine) -> None:
    """The key of a message in hand is bytes; passed on, it must not become another key."""
    number = uuid.UUID(int=7)
    with engine.begin() as db:
        for key in (b"order-1", "order-1", 1, number):
            Outbox().add(db, {}, topic="t", key=key)
        keys = db.execute(select(outbox.c.aggregateid).order_by(outbox.c.seq)).scalars().all()
    assert keys == ["order-1", "order-1", "1", str(number)]


def test_a_delay_may_be_a_timedelta(engine: Engine) -> None:
    """It counts from the database's clock, like seconds."""
    with engine.begin() as db:
        Outbox().add(db, {}, topic="t", delay=timedelta(minutes=5))
        Outbox().add(db, {}, topic="t", delay=300)
        first, second = db.execute(select(delayed.c.due).order_by(delayed.c.seq)).scalars()
    assert abs(first - second) < 60


def test_what_is_no_transaction_is_refused(engine: Engine) -> None:
    """An event that commits by itself would be published although the work failed."""
    outside: Any = engine
    with pytest.raises(ConfigurationError, match=r"pass the Session or Connection"):
        Outbox().add(outside, {}, topic="t")
    with pytest.raises(ConfigurationError, match="NoneType"):
        Outbox().add(None, {}, topic="t")  # type: ignore[call-overload]
    loose = engine.execution_options(isolation_level="AUTOCOMMIT")
    with loose.connect() as db, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(db, {}, topic="t")
    with Session(loose) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(session, {}, topic="t")
    always = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with always.connect() as db, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(db, {}, topic="t")
    always.dispose()
    with engine.begin() as db, pytest.raises(ConfigurationError, match="unknown option priority"):
        Outbox().add(db, {}, topic="t", priority=1)  # type: ignore[call-overload]
    assert staged(engine) == 0


def test_a_scoped_session_is_the_session_of_its_thread(engine: Engine) -> None:
    """As web frameworks hand it out; it is rolled back and committed as any other."""
    scoped = scoped_session(sessionmaker(engine))
    Outbox().add(scoped, {}, topic="t")
    scoped.rollback()
    assert staged(engine) == 0
    Outbox().add_all(scoped, [Event(body=n, topic="t") for n in range(2)])
    scoped.commit()
    scoped.remove()
    assert staged(engine) == 2


def test_a_savepoint_takes_its_events_along(engine: Engine) -> None:
    """What was added since is gone with it, and nothing else is."""
    with Session(engine) as session, session.begin():
        Outbox().add(session, "kept", topic="t")
        with suppress(KeyError), session.begin_nested():
            Outbox().add(session, "gone", topic="t")
            raise KeyError
        with session.begin_nested():
            Outbox().add(session, "kept, too", topic="t")
    with engine.connect() as db:
        found = db.execute(select(outbox.c.payload).order_by(outbox.c.seq)).scalars().all()
    assert found == [b"kept", b"kept, too"]


def test_a_driver_that_commits_each_statement_is_refused(engine: Engine) -> None:
    """Whatever the driver calls it; SQLAlchemy itself knows nothing of that."""
    is_sqlite = engine.dialect.name == "sqlite"
    loose = create_engine(
        engine.url, connect_args={"isolation_level": None} if is_sqlite else {"autocommit": True}
    )
    with Session(loose) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(session, {}, topic="t")
    loose.dispose()
    plain = create_engine(engine.url)
    with Session(plain) as session, session.begin():
        Outbox().add(session, {}, topic="t")
        Outbox().add(session, {}, topic="t")
    plain.dispose()
    assert staged(engine) == 2


def test_a_session_with_several_databases_stages_where_the_outbox_is(engine: Engine) -> None:
    """Bound table by table, as shards and read replicas are."""
    binds = {outbox: engine, delayed: engine, orders: engine}
    with Session(binds=binds) as session, session.begin():
        session.execute(insert(orders).values(id=1))
        Outbox().add(session, {}, topic="t")
        Outbox().add(session, {}, topic="t", delay=60)
    assert staged(engine) == 1


def test_the_current_span_is_stored_with_the_event(engine: Engine) -> None:
    """What the relay publishes later still belongs to the trace of the request."""
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("request") as span, engine.begin() as db:
        message = Outbox().add(db, {}, topic="t")
        headers = dict(db.execute(select(outbox.c.headers)).scalar_one())
    trace = format(span.get_span_context().trace_id, "032x")
    assert message.traceparent is not None
    assert message.traceparent.split("-")[1] == trace
    assert headers["ce_traceparent"] == message.traceparent


@pytest.mark.parametrize("delay", [None, 60.0])
def test_many_events_are_staged_by_one_statement_in_their_order(
    engine: Engine, delay: float | None
) -> None:
    """A batch keeps its order, and the database itself counts a single INSERT."""
    table = outbox if delay is None else delayed
    events = [Event(body=[n], topic="t", key=7, delay=delay) for n in range(500)]
    with engine.begin() as db, inserts_counted(db, table.name) as counted:
        Outbox().add_all(db, events)
        assert counted() == 1
    with engine.connect() as db:
        rows = db.execute(select(table.c.payload).order_by(table.c.seq)).scalars().all()
    assert [bytes(row) for row in rows] == [b"[%d]" % n for n in range(500)]


@contextmanager
def inserts_counted(db: Connection, table: str) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many INSERTs into *table* the database has run."""
    if db.dialect.name == "sqlite":
        seen: list[str] = []
        raw: Any = db.connection.driver_connection
        raw.set_trace_callback(seen.append)
        yield lambda: len([words for words in seen if words.startswith(f"INSERT INTO {table}")])
        raw.set_trace_callback(None)
    elif db.dialect.name == "postgresql":
        db.exec_driver_sql("CREATE TEMP SEQUENCE counted MINVALUE 0")
        db.exec_driver_sql(
            "CREATE FUNCTION pg_temp.count_it() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN PERFORM nextval('counted'); RETURN NULL; END$$"
        )
        db.exec_driver_sql(
            f"CREATE TRIGGER counter AFTER INSERT ON {table} EXECUTE FUNCTION pg_temp.count_it()"
        )
        yield lambda: db.exec_driver_sql("SELECT nextval('counted')").scalar_one()
        db.exec_driver_sql(f"DROP TRIGGER counter ON {table}")
    else:
        status = "SHOW SESSION STATUS LIKE 'Com_insert'"
        before = int(db.exec_driver_sql(status).one()[1])
        yield lambda: int(db.exec_driver_sql(status).one()[1]) - before


def test_whatever_is_in_them_many_rows_are_what_single_ones_are(engine: Engine) -> None:
    """No key, no payload, bytes that are no text, quotes, a zero character."""
    headers = {"plain": 'it\'s "quoted" – ü', "raw": b"\xff\x00", "zero": "a\x00b", "none": None}
    told: Any = {"topic": "orders", "type": "Ö'\"}", "headers": headers}
    bodies = [b"\x00\xff", b"", None, "k'ü\""]
    events = [Event(body=b, key=k, **told) for b, k in zip(bodies, (None, "", 1, "ü"), strict=True)]
    with engine.begin() as db:
        for one in events:
            Outbox().add_all(db, [one])
        Outbox().add_all(db, events)
        rows = db.execute(select(outbox).order_by(outbox.c.seq)).mappings().all()
    for single, bulk in zip(rows[:4], rows[4:], strict=True):
        for name in ("aggregatetype", "aggregateid", "type", "payload"):
            assert bulk[name] == single[name]
        assert _lasting(bulk["headers"]) == _lasting(single["headers"])
        assert bulk["shard"] == shard_of("orders", bulk["aggregateid"], str(bulk["id"]))


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
@pytest.mark.parametrize("delay", [None, 60.0])
@pytest.mark.parametrize("texts", [["k", "a\x1fb"], ["k", "c\x1ed", None], ["", ""]])
def test_texts_with_the_characters_that_part_texts_are_staged_whole(
    engine: Engine, texts: list[str | None], delay: float | None
) -> None:
    """Columns travel as one text each; keys and types that cannot are sent in the usual way."""
    told: Any = {"topic": "t", "delay": delay}
    events = [Event(body=b"x", key=text, type="T", **told) for text in texts]
    events += [Event(body=b"x", key="k", type=text or "T", **told) for text in texts]
    table = outbox if delay is None else delayed
    columns = select(table.c.aggregateid, table.c.type).order_by(table.c.seq)
    with engine.begin() as db:
        for some in events[: len(texts)], events[len(texts) :]:
            Outbox().add_all(db, some)
        rows = db.execute(columns).all()
    assert [tuple(row) for row in rows] == [(one.key, one.type) for one in events]


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_very_many_or_large_events_are_staged_in_portions(engine: Engine) -> None:
    """No statement grows beyond what a server takes; the order holds across them."""
    bodies = [b"%d" % n for n in range(5001)] + [b"x" * 9_000_000] * 2
    with engine.begin() as db, inserts_counted(db, outbox.name) as counted:
        Outbox().add_all(db, [Event(body=body, topic="t") for body in bodies])
        assert counted() == 3
        rows = db.execute(select(outbox.c.payload).order_by(outbox.c.seq)).scalars().all()
    assert list(map(bytes, rows)) == bodies


def test_correlation_and_cause_are_stored_with_the_event(engine: Engine) -> None:
    """An event staged while a message is handled carries its story to the broker."""
    cause = Message.new("payments", b"{}")
    with handling(cause), Session(engine) as session, session.begin():
        message = Outbox().add(session, {"n": 1}, topic="t", key="k", headers={"x-a": b"\xff\x00"})
    assert (message.correlation_id, message.causation_id) == (cause.id, cause.id)
    from holdfast.brokers import connect

    broker = connect("memory:")
    source = broker.source(["t"], group="g")
    Relay(LeaseEngine(engine, broker.sink())).run_once()
    (delivery,) = source.poll(10, 1.0)
    assert delivery.message == message.with_(time=message.time)


def test_a_key_has_one_shard_for_all_writers() -> None:
    """Shards depend on topic and key alone; keyless events spread."""
    assert shard_of("t", "k", "id-1") == shard_of("t", "k", "id-2")
    assert {shard_of("t", None, f"id-{n}") for n in range(1000)} == set(range(SHARDS))


def test_ordered_writers_of_a_key_take_turns(postgres: Postgres) -> None:
    """Without a lock of the application's own, the order of commits is the order of rows."""
    engine = open_database(postgres.database("staging_ordered"))
    create_tables(engine)
    outbox = Outbox(ordered=True)
    second_done = threading.Event()

    def second() -> None:
        with engine.begin() as db:
            outbox.add(db, ["second"], topic="t", key="k")
        second_done.set()

    with engine.connect() as first, first.begin():
        outbox.add(first, ["first"], topic="t", key="k")
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: _waits_for_a_lock(postgres), what="the second writer waits")
        assert not second_done.is_set()
    thread.join(90)
    assert second_done.is_set()
    engine.dispose()


@contextmanager
def statements_of(engine: Engine) -> Iterator[list[str]]:
    """Collect the first words of what is sent to the database, and how many rows they bring."""
    sent: list[str] = []

    def note(
        _db: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool
    ) -> None:
        times = len(parameters) if many else 1
        sent.extend([" ".join(statement.split()[:3])] * times)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def test_what_a_session_changed_is_written_before_its_event(engine: Engine) -> None:
    """The row is locked before the event gets its number, although the commit would flush."""
    with Session(engine) as session, session.begin():
        session.add(Shipment(id=1))
    with Session(engine) as session, session.begin():
        session.get_one(Shipment, 1).status = "sent"
        with statements_of(engine) as sent:
            Outbox().add(session, {}, topic="t", key="1")
    assert [words.split()[0] for words in sent] == ["UPDATE", "INSERT"]


def test_an_event_may_be_added_by_a_hook_of_the_session(engine: Engine) -> None:
    """During a flush there is nothing to flush; the event goes in after what was written."""
    with Session(engine) as session, session.begin():
        event.listen(
            session, "after_flush", lambda session, _: Outbox().add(session, {}, topic="t")
        )
        session.add(Shipment(id=1))
        with statements_of(engine) as sent:
            session.flush()
    tables = [words.split()[2] for words in sent if words.startswith("INSERT")]
    assert tables == ["staged_shipments", "holdfast_outbox"]


def test_writers_through_the_orm_take_turns_by_the_row_they_change(postgres: Postgres) -> None:
    """The order of events is the order of commits, though both sessions flush at the commit."""
    engine = open_database(postgres.database("staging_orm"))
    create_tables(engine)
    tables.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Shipment(id=1))

    def ship(session: Session, status: str) -> None:
        session.get_one(Shipment, 1).status = status
        Outbox().add(session, status, topic="t", key="1")

    def second() -> None:
        with Session(engine) as session, session.begin():
            ship(session, "second")

    thread = threading.Thread(target=second)
    with Session(engine) as session, session.begin():
        ship(session, "first")
        thread.start()
        wait_until(lambda: _waits_for_a_lock(postgres) or not thread.is_alive())
    thread.join(90)
    with Session(engine) as session:
        events = session.scalars(select(outbox.c.payload).order_by(outbox.c.seq)).all()
        assert session.get_one(Shipment, 1).status == "second"
    assert [bytes(payload) for payload in events] == [b"first", b"second"]
    engine.dispose()


def _waits_for_a_lock(postgres: Postgres) -> bool:
    engine = open_database(postgres.url)
    with engine.connect() as db:
        waiting = db.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one()
    engine.dispose()
    return bool(waiting)


def test_ordered_is_refused_where_it_cannot_be_had(mariadb: MariaDB) -> None:
    """MariaDB has no lock that ends with the transaction, so the fix is named instead."""
    engine = open_database(mariadb.database("staging_ordered"))
    create_tables(engine)
    with engine.begin() as db, pytest.raises(ConfigurationError, match="FOR UPDATE"):
        Outbox(ordered=True).add(db, {}, topic="t", key="k")
    engine.dispose()


def test_an_event_can_ride_on_the_statement_that_it_tells_of(postgres: Postgres) -> None:
    """Order and event are one statement, and one rollback takes both."""
    engine = open_database(postgres.database("staging_attach"))
    create_tables(engine)
    tables.create_all(engine)
    ride = Outbox().attach
    with engine.begin() as db:
        db.execute(ride(insert(orders).values(id=1), OrderPlaced(1), topic="orders", key="1"))
    with engine.connect() as db:
        db.execute(ride(insert(orders).values(id=2), OrderPlaced(2), topic="orders", key="2"))
        db.rollback()
    assert staged(engine) == 1
    with engine.connect() as db:
        assert db.execute(select(orders.c.id)).scalars().all() == [1]
    with pytest.raises(ConfigurationError, match=r"use add\(\)"):
        ride(insert(orders), OrderPlaced(3), topic="orders", delay=1.0)
    engine.dispose()


def test_an_attached_event_is_the_row_that_an_added_one_is(postgres: Postgres) -> None:
    """Whatever is in it: no key, bytes that are no text, quotes, a zero character."""
    engine = open_database(postgres.database("staging_attached"))
    create_tables(engine)
    tables.create_all(engine)
    headers = {"plain": 'it\'s "quoted" – ü', "raw": b"\xff\x00", "zero": "a\x00b", "none": None}
    told: Any = {"topic": "orders", "type": "Ö'\"}", "headers": headers}
    with engine.begin() as db:
        for n, key in enumerate((None, "", "k'ü\"")):
            Outbox().add(db, b"\x00\xff", key=key, **told)
            db.execute(Outbox().attach(insert(orders).values(id=n), b"\x00\xff", key=key, **told))
    with engine.connect() as db:
        rows = db.execute(select(outbox).order_by(outbox.c.seq)).mappings().all()
    assert len(rows) == 6
    for added, attached in zip(rows[::2], rows[1::2], strict=True):
        for name in ("aggregatetype", "aggregateid", "type", "payload"):
            assert attached[name] == added[name]
        assert _lasting(attached["headers"]) == _lasting(added["headers"])
        assert attached["shard"] == shard_of("orders", added["aggregateid"], str(attached["id"]))
    engine.dispose()


def _lasting(headers: list[list[Any]]) -> list[list[Any]]:
    made = ("ce_id", "ce_time", "ce_correlationid")
    return [pair for pair in headers if pair[0] not in made]


def test_async_sessions_and_connections_are_awaited(postgres: Postgres) -> None:
    """The same call serves both colours."""
    url = postgres.database("staging_async")
    create_tables(sync := open_database(url))
    tables.create_all(sync)

    async def work() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            session.add(Shipment(id=1))
            with statements_of(engine.sync_engine) as sent:
                await Outbox().add(session, {}, topic="t")
            assert [words.split()[2] for words in sent] == ["staged_shipments", "holdfast_outbox"]
        async with AsyncSession(engine) as session, session.begin():
            message = await Outbox().add(session, {"n": 1}, topic="t", key="k")
            assert message.topic == "t"
        async with engine.begin() as connection:
            await Outbox().add_all(
                connection, [Event(body={}, topic="t"), Event(body={}, topic="u")]
            )
        async with AsyncSession(engine) as session:
            await Outbox().add(session, {"n": 2}, topic="t", key="k")
            await session.rollback()
        await engine.dispose()

    asyncio.run(work())
    assert staged(sync) == 3
    sync.dispose()


def test_an_event_that_was_not_awaited_fails_the_commit(postgres: Postgres) -> None:
    """A forgotten await would lose it; after the rollback the session is as good as new."""
    url = postgres.database("staging_forgotten")
    create_tables(sync := open_database(url))

    async def work() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            await Outbox().add(session, {}, topic="t")
            forgotten = Outbox().add_all(session, [Event(body={}, topic="t")])
            with pytest.raises(ConfigurationError, match=r"write  await outbox\.add"):
                await session.commit()
            forgotten.close()  # type: ignore[attr-defined]
            await session.rollback()
            await Outbox().add(session, {}, topic="t")
            await session.commit()
        await engine.dispose()

    asyncio.run(work())
    assert staged(sync) == 1
    sync.dispose()


def test_an_async_scoped_session_is_the_session_of_its_task(postgres: Postgres) -> None:
    """As the sync one is that of its thread."""
    url = postgres.database("staging_scoped")
    create_tables(sync := open_database(url))

    async def work() -> None:
        engine = create_async_engine(url)
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        await Outbox().add(scoped, {}, topic="t")
        await scoped.commit()
        await scoped.remove()
        await engine.dispose()

    asyncio.run(work())
    assert staged(sync) == 1
    sync.dispose()
