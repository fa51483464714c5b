"""A simulation leaves nothing, whatever the handler tries, and does not say yes to what breaks."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, delete, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session  # noqa: TC002 - handlers are asked for their annotations

from holdfast.consumer.handlers.trial import Trial
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.replay import Selection
from holdfast.dlq.replay.simulation import Escaped, Named, cases, simulate
from holdfast.message import Message
from tests.migrated import migrated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

charges = Table("charges", MetaData(), Column("n", Integer))


def _write(session: Session, order: dict[str, Any]) -> None:
    session.execute(insert(charges).values(n=order["n"]))


def writes(order: dict[str, Any], session: Session) -> None:
    """Do as it should."""
    _write(session, order)
    with session.begin_nested():
        _write(session, order)


def sees_the_others(order: dict[str, Any], session: Session) -> None:
    """Fail unless the ones before have written."""
    assert session.execute(select(func.count()).select_from(charges)).scalar() == order["n"]
    _write(session, order)


def swallows_an_error(order: dict[str, Any], session: Session) -> None:
    """Go on after a statement that failed."""
    _write(session, order)
    with contextlib.suppress(SQLAlchemyError):
        session.execute(text("SELECT * FROM no_such_table"))


def commits_the_session(order: dict[str, Any], session: Session) -> None:
    """Be refused by the consumer too."""
    _write(session, order)
    session.commit()


def commits_the_connection(order: dict[str, Any], session: Session) -> None:
    """Go round the session."""
    _write(session, order)
    session.connection().commit()


def commits_and_says_nothing(order: dict[str, Any], session: Session) -> None:
    """Swallow the refusal."""
    _write(session, order)
    with contextlib.suppress(Exception):
        session.connection().commit()


def rolls_back(order: dict[str, Any], session: Session) -> None:
    """End the transaction the other way, and write in the next one."""
    session.connection().rollback()
    _write(session, order)


def says_commit(order: dict[str, Any], session: Session) -> None:
    """Go round SQLAlchemy's transactions."""
    _write(session, order)
    session.execute(text("/* now */ COMMIT"))


def exits(order: dict[str, Any], session: Session) -> None:
    """Leave as a script does, with success."""
    _write(session, order)
    sys.exit(0)


def commits_the_driver(order: dict[str, Any], session: Session) -> None:
    """Go where nobody watches."""
    _write(session, order)
    driver: Any = session.connection().connection.driver_connection
    driver.commit()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"], scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Keep five dead letters, and the service's table beside them."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('simulation')}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("simulation")
    engine = open_database(url)
    migrated(engine)
    charges.metadata.create_all(engine)
    for n in range(5):
        message = Message.new("orders", b'{"n":%d}' % n, key=f"k{n}")
        DeadLetterStore(engine).put(capture(message, ValueError("x"), group="billing", handler="h"))
    yield engine
    engine.dispose()


def _simulated(engine: Engine, function: Any) -> Any:
    trial = Trial(Named.load(f"{__name__}:{function.__name__}"))
    found_cases = cases(engine, Selection(consumer_group="billing"))
    (found,) = simulate(engine, found_cases, trial, database=engine)
    return found


def _written(engine: Engine) -> int:
    with engine.connect() as db:
        return int(db.execute(select(func.count()).select_from(charges)).scalar_one())


@pytest.mark.parametrize("function", [writes, sees_the_others])
def test_a_good_handler_passes_and_leaves_nothing(engine: Engine, function: Any) -> None:
    """Savepoints of its own are allowed, and each message sees what the ones before wrote."""
    found = _simulated(engine, function)
    assert (found.passes, found.example) == (5, None)
    assert _written(engine) == 0


def test_an_error_that_was_swallowed_is_judged_as_the_database_judges_it(engine: Engine) -> None:
    """PostgreSQL commits nothing after one, the others do."""
    found = _simulated(engine, swallows_an_error)
    assert found.passes == (0 if engine.dialect.name == "postgresql" else 5)
    assert _written(engine) == 0


@pytest.mark.parametrize(
    "function",
    [
        commits_the_session,
        commits_the_connection,
        commits_and_says_nothing,
        rolls_back,
        says_commit,
        exits,
    ],
)
def test_a_handler_that_ends_its_transaction_or_the_process_fails(
    engine: Engine, function: Any
) -> None:
    """Each message says so, none stops the others, and nothing of them stays."""
    found = _simulated(engine, function)
    assert (found.passes, found.fails) == (0, 5)
    assert ("SystemExit" if function is exits else "the consumer ends") in found.example
    assert _written(engine) == 0


def test_a_commit_that_cannot_be_held_back_is_told(engine: Engine) -> None:
    """By the message whose handler did it; the others are not tried."""
    with pytest.raises(Escaped, match=r"message [0-9a-f-]{36}: .*may STAY"):
        _simulated(engine, commits_the_driver)
    assert _written(engine) == 1
    with engine.begin() as db:
        db.execute(delete(charges))
