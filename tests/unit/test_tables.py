"""The tables of the quick run are those that `create_all` makes."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Index, Integer, MetaData, Table, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError
from sqlalchemy.schema import CreateIndex, CreateTable

from holdfast import dlq, idempotency, outbox, sagas
from holdfast.consumer import schema as consumer
from holdfast.db.engine import open_database
from holdfast.db.options import with_options
from holdfast.tracing import schema as tracing
from tests.tables import kept_create_all, plain_create_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PACKAGES = (dlq, idempotency, outbox, sagas, consumer, tracing)


@pytest.fixture
def created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return what a new file holds once *packages* made their tables by *create_all*."""

    def creating(create_all: Any, *packages: Any) -> list[Any]:
        monkeypatch.setattr("sqlalchemy.MetaData.create_all", create_all)
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        engine = open_database(f"sqlite:///{file}")
        for package in packages:
            package.create_tables(engine)
        engine.dispose()
        with sqlite3.connect(file) as db:
            rows = list(db.iterdump())
            made = list(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
        db.close()
        return [*rows, *made]

    return creating


@pytest.mark.parametrize(
    "packages",
    [*((package,) for package in PACKAGES), PACKAGES, PACKAGES[::-1], PACKAGES * 2],
    ids=lambda packages: "+".join(one.__name__.split(".")[1] for one in packages),
)
def test_kept_tables_are_those_that_are_made_anew(
    created: Callable[..., list[Any]], packages: tuple[Any, ...]
) -> None:
    """Alone, beside those of others with a table in common, and where they are already."""
    anew = created(plain_create_all, *packages)
    assert any("CREATE TABLE" in str(line) for line in anew)
    assert created(kept_create_all, *packages) == anew
    assert created(kept_create_all, *packages) == anew


def test_a_table_added_later_is_made_too(tmp_path: Path) -> None:
    """What is kept of a schema ends where the schema changes."""
    metadata = MetaData()
    Table("one", metadata, Column("id", Integer, primary_key=True))
    engine = open_database(f"sqlite:///{tmp_path}/db.db")
    kept_create_all(metadata, engine)
    Table("two", metadata, Column("id", Integer, primary_key=True))
    kept_create_all(metadata, engine)
    assert inspect(engine).get_table_names() == ["one", "two"]
    engine.dispose()


def test_options_of_one_database_are_as_if_given_at_once() -> None:
    """To a compiler, to a copy and to Alembic, which asks for `kwargs`."""
    at_once = Table(
        "t", MetaData(), Column("n", Integer, primary_key=True), sqlite_autoincrement=True
    )
    later = with_options(
        Table("t", MetaData(), Column("n", Integer, primary_key=True)), sqlite_autoincrement=True
    )
    dialect = sqlite.dialect()
    wanted = str(CreateTable(at_once).compile(dialect=dialect))
    assert "AUTOINCREMENT" in wanted
    assert str(CreateTable(later.to_metadata(MetaData())).compile(dialect=dialect)) == wanted
    assert str(CreateTable(later).compile(dialect=dialect)) == wanted
    assert dict(later.kwargs) == dict(at_once.kwargs) == {"sqlite_autoincrement": True}
    index = with_options(Index("i", later.c.n), postgresql_where=later.c.n > 1)
    made = str(CreateIndex(index).compile(dialect=postgresql.dialect()))
    assert made.endswith("(n) WHERE n > 1")


def test_an_option_that_its_database_does_not_know_is_refused_when_it_is_asked_for() -> None:
    """Not silently left out."""
    table = with_options(Table("t", MetaData(), Column("n", Integer)), sqlite_nonsense=True)
    with pytest.raises(ArgumentError, match="nonsense"):
        CreateTable(table).compile(dialect=sqlite.dialect())
