"""Transactions of ours and of handlers are at READ COMMITTED, whatever the engine says."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    Table,
    create_engine,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError

from holdfast.call import Call
from holdfast.consumer.attempt.transaction import (
    HandlerSession,
    Transaction,
    for_handlers,
)
from holdfast.consumer.handlers.arguments import Arguments
from holdfast.db.engine import open_database
from holdfast.db.errors import DatabaseDown
from holdfast.db.transactions import committed, transact
from holdfast.outbox import Outbox
from holdfast.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine

account = Table(
    "account", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer)
)
LEVELS = [None, "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"]
KILLS = {
    "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"),
    "mysql": ("SELECT CONNECTION_ID()", "KILL {}"),
}


@pytest.fixture(params=["postgres", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """Offer a database with a row."""
    url = str(request.getfixturevalue(request.param).database("isolation"))
    engine = open_database(url)
    account.metadata.drop_all(engine)
    account.metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(insert(account).values(id=1, n=0))
    engine.dispose()
    return url


def in_handler(engine: Engine, work: Callable[[Any], Any]) -> Any:
    """Do *work* in the session of a handler."""
    session = HandlerSession(for_handlers(engine))
    try:
        session.begin_guarded()
        return work(session)
    finally:
        session.end(commit=False)


@pytest.mark.parametrize("how", [transact, committed, in_handler])
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_rival_commits_is_seen(url: str, level: str | None, how: Callable[..., Any]) -> None:
    """A snapshot of before would make us fail, or do again what was done."""
    native = {} if level is None else {"isolation_level": level}
    engine, rival = open_database(url, **native), open_database(url)

    def work(db: Any) -> tuple[int, int]:
        before = db.execute(select(account.c.n)).scalar_one()
        with rival.begin() as other:
            other.execute(update(account).values(n=account.c.n + 1))
        return before, db.execute(select(account.c.n)).scalar_one()

    for _ in range(2):  # also on a connection that was given back
        before, after = how(engine, work)
        assert after == before + 1
    engine.dispose()
    rival.dispose()


@pytest.mark.parametrize("how", [transact, committed])
@pytest.mark.parametrize("level", LEVELS)
def test_what_fails_leaves_nothing_behind(
    url: str, level: str | None, how: Callable[..., Any]
) -> None:
    """Also where the engine itself commits each statement."""
    native = {} if level is None else {"isolation_level": level}
    engine = open_database(url, **native)

    def work(db: Connection) -> None:
        db.execute(update(account).values(n=7))
        raise KeyError("after the statement")

    for _ in range(2):
        with pytest.raises(KeyError):
            how(engine, work)
    with engine.connect() as db:
        assert db.execute(select(account.c.n)).scalar_one() == 0
    engine.dispose()


@pytest.mark.parametrize("how", [transact, committed])
def test_on_sqlite_a_transaction_has_the_write_lock_from_its_beginning(
    tmp_path: Path, how: Callable[..., Any]
) -> None:
    """Also on an engine of the user's own, which would take it half-way and fail there."""
    engine = create_engine(f"sqlite:///{tmp_path}/own.db")
    rival = sqlite3.connect(f"{tmp_path}/own.db", timeout=0, isolation_level=None)

    def work(_: Connection) -> None:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            rival.execute("BEGIN IMMEDIATE")

    how(engine, work)
    rival.close()
    engine.dispose()


def _killed_in_its_pool(url: str) -> Engine:
    """Return an engine whose one connection has died while nobody used it."""
    engine, other = open_database(url, pool_size=1), open_database(url)
    mine, kill = KILLS[engine.url.get_backend_name()]
    with engine.connect() as db:
        number = db.execute(text(mine)).scalar_one()
    with other.connect() as db:
        db.execute(text(kill.format(number)))
    other.dispose()
    return engine


def test_a_connection_that_died_in_the_pool_is_known_as_lost(url: str) -> None:
    """By an error that says so, not one of the driver that nobody understands."""
    engine = _killed_in_its_pool(url)
    with pytest.raises(DBAPIError) as caught:
        transact(engine, lambda db: db.execute(select(account.c.n)).scalar_one())
    assert caught.value.connection_invalidated
    assert transact(engine, lambda db: db.execute(select(account.c.n)).scalar_one()) == 0
    engine.dispose()


def test_a_handler_whose_connection_died_in_the_pool_meets_an_outage(url: str) -> None:
    """No failed attempt; the next one has a new connection."""
    engine = _killed_in_its_pool(url)

    def work(session: Any) -> int:
        return int(session.execute(select(account.c.n)).scalar_one())

    injection = Arguments({"session": "session"}, outbox=Outbox())
    plan = Pipeline((Transaction(engine), injection), work)
    with pytest.raises(DatabaseDown):
        plan.run(Call((), {}))
    assert plan.run(Call((), {})) == 0
    engine.dispose()


def test_the_dead_letter_store_gets_over_a_connection_that_died_in_the_pool(url: str) -> None:
    """It tries again by itself, on a new one."""
    engine = _killed_in_its_pool(url)
    assert committed(engine, lambda db: db.execute(select(account.c.n)).scalar_one()) == 0
    engine.dispose()
