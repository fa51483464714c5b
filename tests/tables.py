"""Tables of SQLite from kept text: compiled once in a process, not for every test.

`create_all` asks for each table whether it is there, and makes its statements anew. That is half
of what a small test costs. The full run does it; the quick one repeats what it wrote before.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import MetaData, create_engine
from sqlalchemy.engine import Engine

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

plain_create_all = MetaData.create_all
"""SQLAlchemy's own."""
_Steps = list[tuple[str, tuple[Any, ...]]]
_kept: WeakKeyDictionary[MetaData, dict[str, _Steps]] = WeakKeyDictionary()
"""By table, what makes it with its indexes and the rows it begins with."""


def keep_tables() -> None:
    """Let `create_all` repeat its statements on SQLite, for each table that is not there."""
    MetaData.create_all = kept_create_all  # type: ignore[assignment, method-assign]


def kept_create_all(self: MetaData, bind: Engine | Connection, *args: Any, **more: Any) -> None:
    """Create the tables that are not there, on SQLite by statements that were kept."""
    if bind.dialect.name != "sqlite" or args or more:
        plain_create_all(self, bind, *args, **more)
    elif isinstance(bind, Engine):
        with bind.begin() as db:
            _create(self, db)
    else:
        _create(self, bind)


def _create(metadata: MetaData, db: Connection) -> None:
    own = db.connection.driver_connection
    if not isinstance(own, sqlite3.Connection):
        plain_create_all(metadata, db)
        return
    there = {name for (name,) in own.execute("SELECT name FROM sqlite_master")}
    for table, steps in _steps(metadata).items():
        if table not in there:
            for statement, values in steps:
                own.execute(statement, values)


def _steps(metadata: MetaData) -> dict[str, _Steps]:
    known = _kept.get(metadata, {})
    if known.keys() != metadata.tables.keys():
        memory = sqlite3.connect(":memory:")
        try:
            plain_create_all(metadata, create_engine("sqlite://", creator=lambda: memory))
            known = {table: _dump(memory, table) for table in metadata.tables}
        finally:
            memory.close()
        _kept[metadata] = known
    return known


def _dump(memory: sqlite3.Connection, table: str) -> _Steps:
    made = "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL ORDER BY rowid"
    steps: _Steps = [(sql, ()) for (sql,) in memory.execute(made, (table,))]
    for row in memory.execute(f'SELECT * FROM "{table}"'):  # noqa: S608 - a name of our own
        places = ", ".join("?" * len(row))
        steps.append((f'INSERT INTO "{table}" VALUES ({places})', row))  # noqa: S608
    return steps
