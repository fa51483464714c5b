"""Named SQL in files, and look-ups by lists: visible, reviewable, never assembled from strings."""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    Select,
    Text,
    TextClause,
    bindparam,
    cast,
    func,
    insert,
    select,
    text,
    true,
)

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.engine import Connection, Dialect
    from sqlalchemy.orm import Session

_LISTED = "listed"
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def statements(package: str, dialect: str) -> dict[str, TextClause]:
    """Return the statements of *package*'s `sql/<dialect>.sql`, by the names given there.

    MariaDB uses MySQL's file. A statement starts after a line `-- name: its_name`.
    """
    name = "mysql" if dialect == "mariadb" else dialect
    path = files(package).joinpath("sql", f"{name}.sql")
    if not path.is_file():
        raise ConfigurationError(
            f"{package} does not support the database {dialect!r}: use PostgreSQL, MySQL, "
            "MariaDB or SQLite"
        )
    parts = _NAME.split(path.read_text())[1:]
    return {key: text(body.strip()) for key, body in zip(parts[::2], parts[1::2], strict=True)}


def executed(db: Session | Connection, statement: TextClause, values: Mapping[str, Any]) -> Any:
    """Run one of `statements` with *values*; what the ORM and the compiler do is left out.

    It is spelled for its database already, and they cost more than the driver. SQLAlchemy's
    events of cursors and its errors are the same.
    """
    given: Any = db
    connection: Connection = given.connection() if hasattr(given, "get_bind") else given
    sql, places = _spelled(statement, connection.dialect)
    ordered: Any = values if places is None else tuple(values[name] for name in places)
    return connection.exec_driver_sql(sql, ordered)


def spelled(statement: TextClause, dialect: Dialect) -> str:
    """Return one of `statements` as the driver of *dialect* takes it, with named values."""
    return _spelled(statement, dialect)[0]


@lru_cache(maxsize=500)
def _spelled(statement: TextClause, dialect: Dialect) -> tuple[str, list[str] | None]:
    """Return *statement* as the driver takes it, and the order of its values if that has one."""
    compiled: Any = statement.compile(dialect=dialect)
    return str(compiled), compiled.positiontup if compiled.positional else None


def looked_up(dialect: str, wanted: Select[Any], column: Any) -> Any:
    """Return *wanted* as a relation: the rows in which the indexed *column* is one of a list.

    The list is bound by `listed`. PostgreSQL takes a name that it knows nothing of for one row
    in two hundred. On a fresh table it would find all rows of a group by an index, and compare
    each with each value. So each value is looked up by itself there, and conditions on the
    relation come after that.
    """
    if dialect != "postgresql":
        return wanted.where(column.in_(bindparam(_LISTED, expanding=True))).subquery("found")
    elements = func.json_array_elements_text(cast(bindparam(_LISTED, type_=Text), JSON))
    values = elements.table_valued("value").render_derived("listed")
    found = wanted.where(column == values.c.value).offset(0).lateral("one")
    return select(*found.c).select_from(values.join(found, true())).subquery("found")


def listed(dialect: str, values: Sequence[str]) -> dict[str, Any]:
    """Return *values* as the list of what `looked_up` made."""
    if dialect != "postgresql":
        return {_LISTED: list(values)}
    # Not escaped: what a database's own encoding cannot hold would be refused, not just unknown.
    return {_LISTED: json.dumps(values, ensure_ascii=False)}


_SEPARATOR, _NULL = "\x1f", "\x1e"


class Inseparable(ValueError):
    """A text holds a character that would part it from others: they cannot be sent as one."""


def column_text(values: Sequence[str | None]) -> str | None:
    """Return the *values* of a column as one text, None if all are null.

    PostgreSQL takes it apart by `string_to_array(…, chr(31), chr(30))`: of all forms of many rows,
    arrays of psycopg and JSON included, that costs both sides least. Raises `Inseparable`.
    """
    nulls = values.count(None)
    if nulls == len(values):
        return None
    text = _SEPARATOR.join(_NULL if value is None else value for value in values)
    if not text or text.count(_SEPARATOR) != len(values) - 1 or text.count(_NULL) != nulls:
        raise Inseparable
    return text


def insert_ignoring(db: Connection, table: Any) -> Any:
    """Return an insert into *table* that leaves an existing row as it is."""
    match db.dialect.name:
        case "sqlite":
            from sqlalchemy.dialects import sqlite

            return sqlite.insert(table).on_conflict_do_nothing()
        case "postgresql":
            from sqlalchemy.dialects import postgresql

            # Without preserve_rowcount SQLAlchemy answers -1 here, which is truthy.
            statement = postgresql.insert(table).on_conflict_do_nothing()
            return statement.execution_options(preserve_rowcount=True)
        case "mysql" | "mariadb":
            return insert(table).prefix_with("IGNORE")
        case other:
            raise ConfigurationError(
                f"no dead-letter store on {other!r}: use PostgreSQL, MySQL, MariaDB or SQLite"
            )
