"""A transaction that the database gave up for a rival is begun again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast.backoff import Backoff
from holdfast.db.engine import open_database
from holdfast.db.errors import is_deadlock
from holdfast.db.transactions import ErrorPolicy, transact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Connection, Engine

account = Table(
    "account", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer)
)


@pytest.fixture(params=["postgres", "mariadb"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Open a database with two rows to fight over."""
    engine = open_database(request.getfixturevalue(request.param).database("rivals"))
    account.metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(insert(account), [{"id": n, "n": 0} for n in (1, 2)])
    yield engine
    engine.dispose()


class Rival:
    """Changes both rows, in an order that crosses that of the other rival."""

    def __init__(self, order: tuple[int, int], both: threading.Barrier) -> None:
        self.attempts = 0
        self._order = order
        self._both = both

    def work(self, db: Connection) -> None:
        self.attempts += 1
        for row in self._order:
            db.execute(update(account).where(account.c.id == row).values(n=account.c.n + 1))
            if self.attempts == 1 and row == self._order[0]:
                self._both.wait(90)


def fight(engine: Engine, backoff: Backoff) -> list[Rival]:
    """Let two rivals meet in a deadlock; return them once both are through."""
    both, policy = threading.Barrier(2), ErrorPolicy(backoff=backoff)
    rivals = [Rival((1, 2), both), Rival((2, 1), both)]
    with ThreadPoolExecutor(2) as pool:
        fights = [pool.submit(transact, engine, r.work, errors=policy) for r in rivals]
    for each in fights:
        each.result()
    return rivals


def test_both_rivals_of_a_deadlock_commit(engine: Engine) -> None:
    """One is the victim, begins again, and neither hears of it."""
    rivals = fight(engine, Backoff(first=0.02, ceiling=1, attempts=12))
    assert sum(rival.attempts for rival in rivals) >= 3
    with engine.connect() as db:
        assert db.execute(select(account.c.n).order_by(account.c.id)).scalars().all() == [2, 2]


def test_without_another_attempt_the_victim_fails(engine: Engine) -> None:
    """The deadlock is a real one."""
    with pytest.raises(OperationalError) as caught:
        fight(engine, Backoff(first=0.02, ceiling=1, attempts=1))
    assert is_deadlock(caught.value)


def test_what_is_no_deadlock_is_not_tried_again(engine: Engine) -> None:
    """An error of the work itself comes out at once."""
    attempts = []

    def work(db: Connection) -> None:
        attempts.append(1)
        db.execute(insert(account), {"id": 1, "n": 0})

    with pytest.raises(DBAPIError) as caught:
        transact(engine, work)
    assert not is_deadlock(caught.value)
    assert attempts == [1]


def test_not_every_error_is_taken_for_a_deadlock() -> None:
    """Only what the database says counts."""
    assert not is_deadlock(ValueError(1))
    assert not is_deadlock(DBAPIError("x", {}, Exception("no number")))
    assert is_deadlock(DBAPIError("x", {}, Exception(1213, "Deadlock found")))
