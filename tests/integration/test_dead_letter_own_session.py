"""`@dead_letter` around a function that works in its caller's transaction, on SQLite."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event, func, insert, select
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from holdfast import Message
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, dead_letter
from holdfast.dlq import create_tables as create_letters
from holdfast.dlq.store.schema import message as letters
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.idempotency import create_tables, idempotent
from holdfast.idempotency.schema import inbox
from holdfast.testing import VirtualClock
from tests.integration.idempotency.conftest import business, effects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

ORDER = Message.new("orders", b"{}")
SOON = {"timeout": 0.1}
"""What would wait for itself does not keep the suite waiting."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """Offer a database in a file, with every table."""
    engine = open_database(f"sqlite:///{tmp_path}/own.db", connect_args=SOON)
    for create in (create_tables, create_letters, business.create_all):
        create(engine)
    yield engine
    engine.dispose()


def home(engine: Engine) -> DeadLetterStore:
    return DeadLetterStore(engine, clock=VirtualClock(auto=True))


def rows(engine: Engine, table: Any) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def bill(order: Message, session: Any) -> None:
    """Write, and fail for good."""
    session.execute(insert(effects).values(name="half"))
    raise PoisonMessage("no total")


@pytest.mark.parametrize("opened", [Session, lambda engine: engine.connect()])
@pytest.mark.parametrize("once", [True, False])
def test_a_letter_that_would_wait_for_its_own_caller_is_refused_at_once(
    database: Engine, opened: Any, once: bool
) -> None:
    """The failure goes out with what to change, so that nothing is acknowledged."""
    handle = dead_letter(home(database))(idempotent(bill) if once else bill)
    said = "function that opens the session"
    with (
        pytest.raises(ConfigurationError, match=said) as refused,
        opened(database) as session,
        session.begin(),
    ):
        handle(ORDER, session)
    assert isinstance(refused.value.__cause__, PoisonMessage)
    assert [rows(database, table) for table in (letters, inbox, effects)] == [0, 0, 0]


def test_the_registry_of_a_scoped_session_is_seen_through(database: Engine) -> None:
    """A web framework passes it on as it is."""
    session = scoped_session(sessionmaker(database))
    with pytest.raises(ConfigurationError, match="function that opens the session"):
        dead_letter(home(database))(idempotent(bill))(ORDER, session)
    session.remove()


def test_an_async_letter_is_refused_alike(database: Engine) -> None:
    """The session is a plain one there, too."""

    @dead_letter(home(database))
    @idempotent
    async def handle(order: Message, session: Session) -> None:
        bill(order, session)

    with Session(database) as session, session.begin(), pytest.raises(ConfigurationError):
        asyncio.run(handle(ORDER, session))
    assert rows(database, letters) == 0


def test_a_letter_is_refused_however_the_url_spells_the_file(
    database: Engine, tmp_path: Path
) -> None:
    """By a link, or as a URI of SQLite."""
    (tmp_path / "link").symlink_to(tmp_path)
    for url in (
        f"sqlite:///{tmp_path}/link/own.db",
        f"sqlite:///file:{tmp_path}/own.db?mode=rw&uri=true",
    ):
        other = open_database(url, connect_args=SOON)
        handle = dead_letter(home(other))(idempotent(bill))
        with Session(database) as session, session.begin(), pytest.raises(ConfigurationError):
            handle(ORDER, session)
        other.dispose()


def test_a_letter_around_the_whole_transaction_is_stored(database: Engine) -> None:
    """What the refusal advises: the transaction has ended when the letter is written."""
    once = idempotent(bill)

    @dead_letter(home(database))
    def handle(order: Message) -> None:
        with Session(database) as session, session.begin():
            once(order, session)

    handle(ORDER)
    assert [rows(database, table) for table in (letters, inbox, effects)] == [1, 0, 0]


def test_a_letter_that_waits_for_nobody_is_stored(database: Engine, tmp_path: Path) -> None:
    """The caller has a database of its own, has not begun, has ended, or only reads."""
    elsewhere = open_database(f"sqlite:///{tmp_path}/else.db")
    for create in (create_tables, business.create_all):
        create(elsewhere)
    reading = create_engine(database.url)
    event.listen(reading, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    event.listen(reading, "begin", lambda db: db.exec_driver_sql("BEGIN"))

    @dead_letter(home(database))
    def fails(order: Message, session: Session, *, ends: bool = False, reads: bool = False) -> None:
        if ends:
            session.execute(insert(effects).values(name="whole"))
            session.commit()
        if reads:
            session.execute(select(effects))
        raise PoisonMessage("no total")

    def new() -> Message:
        return Message.new("orders", b"{}")

    with Session(elsewhere) as session, session.begin():
        dead_letter(home(database))(idempotent(bill))(new(), session)
    with Session(database) as session, session.begin():
        fails(new(), session)
    with Session(database) as session:
        fails(new(), session, ends=True)
    with Session(reading) as session:
        fails(new(), session, reads=True)
    assert rows(database, letters) == 4
    for engine in (elsewhere, reading):
        engine.dispose()
