"""A database of each kind with the tables of the consumer side, empty for every test."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, delete
from sqlalchemy.exc import DBAPIError

from holdfast.db.engine import open_database
from holdfast.db.errors import is_deadlock
from holdfast.idempotency import create_tables, metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

T = TypeVar("T")

business = MetaData()
effects = Table(
    "effects",
    business,
    Column("id", Integer, primary_key=True),
    Column("name", String(255), nullable=False),
)
"""What handlers write: one row for each time an effect happened."""


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Engine]]:
    """Open databases by their kind, each once for the module."""
    made: dict[str, Engine] = {}

    def opened(kind: str) -> Engine:
        """Return the database, emptied."""
        if kind not in made:
            if kind == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('inbox')}/inbox.db"
            else:
                url = request.getfixturevalue(kind).database("inbox")
            made[kind] = open_database(url)
            create_tables(made[kind])
            business.create_all(made[kind])
        with made[kind].begin() as db:
            for table in (*metadata.sorted_tables, effects):
                db.execute(delete(table))
        return made[kind]

    yield opened
    for engine in made.values():
        engine.dispose()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    """Offer a database of each kind, with empty tables."""
    return engines(request.param)


def persistently(work: Callable[[], T]) -> T:
    """Return what *work* returns, tried again when the database breaks a deadlock by it."""
    for _ in range(50):
        try:
            return work()
        except DBAPIError as error:
            if not is_deadlock(error):
                raise
    return work()


def together(*works: Callable[[], object]) -> None:
    """Run *works* at the same time, each in its own thread; raise what one of them raised."""
    start = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
