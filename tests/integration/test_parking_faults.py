"""Nothing overtakes a parked event of its key, also when the database fails once meanwhile."""

from __future__ import annotations

import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from holdfast.db.engine import open_database
from holdfast.outbox import LeaseEngine, LeaseTerms, Outbox, Relay, create_tables
from holdfast.outbox.schema import SHARDS, parked, shard
from holdfast.outbox.schema import relay as relays
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.testing import VirtualClock, wait_until
from tests.wal.shop import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

LEASE = 600.0
"""Seconds; renewed at a third, by a clock that the test turns."""


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "wal"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return which database, and `wal` for PostgreSQL's log."""
    return str(request.param)


@pytest.fixture
def engine(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Yield a database of its own with the outbox tables."""
    url = f"sqlite:///{tmp_path}/shop.db"
    if kind != "sqlite":
        server = request.getfixturevalue("postgres" if kind == "wal" else kind)
        url = server.database(f"parking_{zlib.crc32(request.node.name.encode())}")
    engine = open_database(url)
    create_tables(engine)
    yield engine
    if kind == "wal":
        drop_slot(engine)
    engine.dispose()


def moving(kind: str, engine: Engine, sink: Recorder, clock: VirtualClock) -> Any:
    """Return the engine of a relay whose leases last as long as the test needs."""
    terms = LeaseTerms(seconds=LEASE)
    make = WalEngine if kind == "wal" else LeaseEngine
    return make(engine, sink, terms=terms, clock=clock)


def stage(engine: Engine, *bodies: str) -> None:
    """Commit one event after the other, all of one key."""
    for body in bodies:
        with engine.begin() as db:
            Outbox().add(db, body.encode(), topic="t", key="k")


def rest(relay: Any) -> None:
    """Step until there is nothing to do, and every shard is ours."""
    wait_until(lambda: relay.step().idle and relay.shards == SHARDS, what="it rests")


def waiting(engine: Engine) -> int:
    """Return how many events are parked."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(parked)).scalar_one()


@contextmanager
def failing_look(engine: Engine) -> Iterator[list[str]]:
    """Let the database fail the next look at the parked keys, once; yield what failed."""
    failed: list[str] = []

    def fail(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not failed and "FROM holdfast_outbox_parked" in statement:
            failed.append(statement)
            raise OperationalError(statement, {}, Exception("the connection is lost"))

    event.listen(engine, "before_cursor_execute", fail)
    try:
        yield failed
    finally:
        event.remove(engine, "before_cursor_execute", fail)


@contextmanager
def lost_answer(engine: Engine) -> Iterator[list[str]]:
    """Let the next commit that parks something succeed, and its answer be lost."""
    parking: list[str] = []
    lost: list[str] = []

    def note(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not lost and "INSERT INTO holdfast_outbox_parked" in statement:
            parking.append(statement)

    def lose(db: Any) -> None:
        if parking and not lost:
            lost.append(parking[0])
            db.connection.dbapi_connection.commit()
            raise OperationalError("COMMIT", {}, Exception("the connection is lost"))

    event.listen(engine, "before_cursor_execute", note)
    event.listen(engine, "commit", lose)
    try:
        yield lost
    finally:
        event.remove(engine, "before_cursor_execute", note)
        event.remove(engine, "commit", lose)


def test_a_failed_look_at_the_parked_keys_lets_nothing_past_them(kind: str, engine: Engine) -> None:
    """Another relay had the shards and parked an event; the look after the handover fails."""
    clock, sink, other = VirtualClock(), Recorder(), Recorder()
    heir = moving(kind, engine, sink, clock)
    rest(heir)
    clock.advance(LEASE / 3 - 0.1)
    rest(heir)  # it has looked just now
    with engine.begin() as db:  # as if it had been frozen for longer than its lease
        db.execute(shard.update().values(until=0))
        db.execute(relays.update().values(until=0))
    stage(engine, "first")
    other.refused = {"first"}
    Relay(LeaseEngine(engine, other)).run_once()
    assert waiting(engine) == 1
    stage(engine, "second")
    clock.advance(0.2)
    with failing_look(engine) as failed:
        wait_until(lambda: _failed(heir, failed), what="the look has failed")
    second_goes_aside_or_out(heir, engine, sink)
    heir.close()
    assert sink.bodies == []


def second_goes_aside_or_out(relay: Any, engine: Engine, sink: Recorder) -> None:
    """Step until the second event is parked, or published past the first."""

    def is_decided() -> bool:
        relay.step()
        return bool(sink.bodies) or waiting(engine) == 2

    wait_until(is_decided, what="the second event is parked")


def _failed(relay: Any, failed: list[str]) -> bool:
    with suppress(OperationalError):
        relay.step()
    return bool(failed)


def test_what_was_parked_without_an_answer_holds_its_key_back(kind: str, engine: Engine) -> None:
    """The transaction that parks has committed, and the connection died before it could say so."""
    clock, sink = VirtualClock(), Recorder()
    sink.refused = {"first"}
    relay = moving(kind, engine, sink, clock)
    rest(relay)
    with lost_answer(engine) as lost:
        stage(engine, "first")
        wait_until(lambda: _failed(relay, lost), what="the answer is lost")
    assert waiting(engine) == 1
    stage(engine, "second")
    second_goes_aside_or_out(relay, engine, sink)
    relay.close()
    assert sink.bodies == []
