"""Events are staged in the caller's transaction, of every kind."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import ConfigurationError, InvalidMessage, Message, handling
from holdfast.database import open_database
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.rows import shard_of
from holdfast.outbox.schema import SHARDS, delayed, outbox
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import MariaDB, Postgres

tables = MetaData()
orders = Table("staged_orders", tables, Column("id", Integer, primary_key=True))


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
        ({"topic": "t", "delay": -1}, "0 or more"),
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


def test_many_events_are_staged_by_one_statement_in_their_order(engine: Engine) -> None:
    """A batch keeps its order, and shares the transaction."""
    with Session(engine) as session, session.begin():
        Outbox().add_all(session, [Event(body=[n], topic="t", key=7) for n in range(500)])  # type: ignore[arg-type]
    with engine.connect() as db:
        rows = db.execute(select(outbox.c.payload).order_by(outbox.c.seq)).scalars().all()
    assert [bytes(row) for row in rows] == [b"[%d]" % n for n in range(500)]


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
    thread.join(30)
    assert second_done.is_set()
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


def test_async_sessions_and_connections_are_awaited(postgres: Postgres) -> None:
    """The same call serves both colours."""
    url = postgres.database("staging_async")
    create_tables(sync := open_database(url))

    async def work() -> None:
        engine = create_async_engine(url)
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


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_key_of_bytes_is_the_same_key_as_its_text(engine: Engine) -> None:
    """As in `key=message.key`, inside a handler."""
    with engine.begin() as db:
        Outbox().add(db, {}, topic="t", key=b"order-1")
    with engine.connect() as db:
        assert db.execute(select(outbox.c.aggregateid)).scalar_one() == "order-1"


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        ({"a": float("nan")}, {}, r"\$\.a is NaN"),
        ([1, float("inf"), None], {}, r"\$\[1\] is NaN or infinite"),
        ({}, {"delay": "3"}, "delay='3'"),
        ({}, {"delay": float("inf")}, "delay=inf"),
        ({}, {"delay": -1}, "delay=-1"),
        ({}, {"key": "\ud800"}, "key"),
        ({}, {"key": b"\xff"}, "not text"),
        ({}, {"key": "a\0b"}, "null character"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_name(
    engine: Engine, body: Any, options: dict[str, Any], said: str
) -> None:
    """In the caller, before the commit, with the value and the fix."""
    with engine.begin() as db, pytest.raises(InvalidMessage, match=said):
        Outbox().add(db, body, topic="t", **options)
    assert staged(engine) == 0


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_without_a_transaction_nothing_is_staged(engine: Engine) -> None:
    """An event that commits by itself would be published whatever becomes of the caller."""
    loose = engine.execution_options(isolation_level="AUTOCOMMIT")
    with loose.connect() as db, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(db, {}, topic="t")
    with Session(loose) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Outbox().add(session, {}, topic="t")
    for wrong in (engine, None):
        with pytest.raises(ConfigurationError, match="no transaction"):
            Outbox().add(wrong, {}, topic="t")  # type: ignore[call-overload]
    with engine.begin() as db, pytest.raises(ConfigurationError, match="colour"):
        Outbox().add(db, {}, topic="t", colour="red")
    assert staged(engine) == 0


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_session_of_several_databases_stages_where_the_outbox_is(
    engine: Engine, *, ordered: bool
) -> None:
    """Bound by table, as routing sessions are."""
    with Session(binds={outbox: engine, delayed: engine}) as session, session.begin():
        Outbox(ordered=ordered).add(session, {}, topic="t", key="k")
        Outbox().add(session, {}, topic="t", key="k", delay=5)
    assert staged(engine) == 1
