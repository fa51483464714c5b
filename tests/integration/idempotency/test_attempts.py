"""Attempts in a transaction of the caller's own: a failed one leaves nothing in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import tenacity
from sqlalchemy import create_engine, func, insert, select
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.idempotency import create_tables, idempotent
from holdfast.idempotency.savepoints import Savepoint
from holdfast.idempotency.schema import inbox
from holdfast.retry import Backoff, retry, timeout
from tests.integration.idempotency.conftest import business, effects

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy.engine import Engine

AGAIN = Backoff(first=0.001, ceiling=0.001, attempts=3)
REFUSED = tenacity.retry_if_result(lambda result: result is None)


def names(engine: Engine) -> list[str]:
    with engine.connect() as db:
        return list(db.execute(select(effects.c.name).order_by(effects.c.id)).scalars())


def claims(engine: Engine) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(inbox)).scalar_one()


def bad_first(calls: list[int]) -> Callable[..., str]:
    """Return a handler that writes, and then fails the first time."""

    def bill(order: Message, session: Session) -> str:
        calls.append(1)
        session.execute(insert(effects).values(name=f"{len(calls)}"))
        if len(calls) == 1:
            raise ConnectionError("gateway blip")
        return "billed"

    return bill


@pytest.mark.parametrize("open_", [Session, lambda engine: engine.connect()])
def test_a_retry_in_the_callers_transaction_is_no_duplicate(database: Engine, open_: Any) -> None:
    """The failed attempt keeps neither its claim nor its half of the work."""
    calls: list[int] = []
    bill = retry(AGAIN)(idempotent(bad_first(calls)))
    order = Message.new("orders", b"{}")
    with open_(database) as session, session.begin():
        session.execute(insert(effects).values(name="before"))
        assert bill(order, session) == "billed"
    assert names(database) == ["before", "2"]
    with open_(database) as session, session.begin():
        assert bill(order, session) is None
    assert (len(calls), claims(database)) == (2, 1)


def test_an_error_that_the_caller_swallows_is_not_remembered_as_done(database: Engine) -> None:
    """As a dead letter does: its block commits, and the message comes again after the fix."""
    calls: list[int] = []
    bill = idempotent(bad_first(calls))
    order = Message.new("orders", b"{}")
    with Session(database) as session, session.begin(), pytest.raises(ConnectionError):
        bill(order, session)
    assert (names(database), claims(database)) == ([], 0)
    with Session(database) as session, session.begin():
        assert bill(order, session) == "billed"
    assert names(database) == ["2"]


@pytest.mark.programs
def test_an_async_retry_in_the_callers_transaction_is_no_duplicate(
    engines: Callable[[str], Engine],
) -> None:
    """With sessions of either colour."""
    database = engines("postgres")
    calls: list[str] = []

    @retry(AGAIN)
    @idempotent
    async def bill(order: Message, session: Any) -> str:
        done = session.execute(insert(effects).values(name=f"{len(calls)}"))
        if isinstance(session, AsyncSession):
            await done
        calls.append(order.id)
        if calls.count(order.id) == 1:
            raise ConnectionError("gateway blip")
        return "billed"

    async def run() -> None:
        engine = create_async_engine(database.url)
        async with AsyncSession(engine) as session, session.begin():
            assert await bill(Message.new("orders", b"{}"), session) == "billed"
        with Session(database) as plain, plain.begin():
            assert await bill(Message.new("orders", b"{}"), plain) == "billed"
        await engine.dispose()

    asyncio.run(run())
    assert (names(database), claims(database)) == (["1", "3"], 2)


@pytest.mark.programs
def test_an_async_attempt_cut_off_in_its_claim_keeps_no_claim(
    engines: Callable[[str], Engine],
) -> None:
    """The thread claims to the end; then it is undone, and the next attempt is the first."""
    database = engines("postgres")
    order = Message.new("orders", b"{}")

    async def run() -> None:
        started, claimed = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def key(_order: Message) -> str:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(claimed.wait(), loop).result()
            return order.id

        @idempotent(key=key)
        async def bill(_order: Message, session: Session) -> str:
            session.execute(insert(effects).values(name="billed"))
            return "billed"

        with Session(database) as session, session.begin():
            task = asyncio.create_task(bill(order, session))
            await started.wait()
            task.cancel()
            claimed.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await bill(order, session) == "billed"

    asyncio.run(run())
    assert names(database) == ["billed"]


@pytest.mark.parametrize("on_time", [lambda f: f, timeout(60)])
def test_a_refused_result_is_not_remembered_as_done(database: Engine, on_time: Any) -> None:
    """What led to it is undone, and the next attempt is no duplicate."""
    calls: list[int] = []

    @retry(AGAIN, on=REFUSED)
    @on_time
    @idempotent
    def poll(order: Message, session: Session) -> str | None:
        calls.append(1)
        session.execute(insert(effects).values(name=f"{len(calls)}"))
        return None if len(calls) < 3 else "ready"

    with Session(database) as session, session.begin():
        assert poll(Message.new("orders", b"{}"), session) == "ready"
    assert (names(database), claims(database)) == (["3"], 1)


def test_an_engine_of_the_users_own_is_not_committed_by_a_savepoint(tmp_path: Path) -> None:
    """The driver of SQLite begins no transaction for one by itself."""
    engine = create_engine(f"sqlite:///{tmp_path}/own.db")
    create_tables(engine)
    business.create_all(engine)
    bill = idempotent(bad_first([0]))
    with Session(engine) as session:
        bill(Message.new("orders", b"{}"), session)
        session.rollback()
    assert (names(engine), claims(engine)) == ([], 0)
    engine.dispose()


@pytest.mark.programs
def test_nobody_goes_on_in_a_transaction_that_a_deadlock_took(
    engines: Callable[[str], Engine],
) -> None:
    """MariaDB then has undone what the caller did before: it must not commit the rest."""
    database = engines("mariadb")
    with Session(database) as session:
        session.execute(insert(effects).values(name="before"))
        part = Savepoint(session)
        session.connection().connection.driver_connection.rollback()  # type: ignore[union-attr]
        part.undo()
        with pytest.raises((PendingRollbackError, DBAPIError)):
            session.execute(insert(effects).values(name="after"))
        session.rollback()
    assert names(database) == []
