"""Inserting many event rows with one statement, in their order."""

from __future__ import annotations

from base64 import b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Text, bindparam, insert, literal_column
from sqlalchemy.exc import DBAPIError

from holdfast.errors import MessageTooLarge
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Table
    from sqlalchemy.engine import Connection

    from holdfast.message import Message

_MOST_ROWS, _MOST_BYTES = 5000, 16_000_000
_SUSPECT_BYTES, _SPARE_BYTES = 500_000, 10_000
"""From which size an event may be why a server went away; and what a statement has around it."""
_SQLITE_ROWS = {"insertmanyvalues_page_size": 1000}
_json = msgspec.json.Encoder().encode


@contextmanager
def too_large_told(db: Connection, messages: Sequence[Message]) -> Iterator[None]:
    """Raise `MessageTooLarge` where that is why: MySQL and MariaDB only end the connection then."""
    try:
        yield
    except DBAPIError as error:
        largest = max((message.size for message in messages), default=0)
        if db.dialect.name not in ("mysql", "mariadb") or largest < _SUSPECT_BYTES:
            raise
        try:
            with db.engine.connect() as other:
                most = int(other.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
        except DBAPIError:
            raise error from None  # it is down indeed
        if largest <= most - _SPARE_BYTES:
            raise
        raise MessageTooLarge(
            largest, most, "an event (max_allowed_packet of the server)"
        ) from error


def insert_all(db: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert *rows* in their order: one statement for up to 5,000 rows or 16 MB on PostgreSQL.

    On SQLite it is one for 1,000 rows; the drivers of MySQL and MariaDB send one for as
    many as a packet holds.
    """
    dialect = db.dialect
    if len(rows) > 1 and dialect.name == "postgresql":
        # psycopg sends one statement per row otherwise; as arrays they take longer than as JSON.
        command = statements("holdfast.outbox", dialect.name)[f"fill_{table.name}"]
        command = command.bindparams(bindparam("events", type_=Text))
        for some in _portions(rows):
            db.execute(command, {"events": _json([_encoded(row) for row in some]).decode()})
    elif len(rows) > 1 and dialect.name == "sqlite" and dialect.insert_executemany_returning:
        several: Any = insert(table).returning(literal_column("1"))  # which joins the rows
        db.execute(several, rows, execution_options=_SQLITE_ROWS)
    else:
        db.execute(insert(table), rows)


def _portions(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    some: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        own = len(row["payload"] or b"")
        if some and (len(some) == _MOST_ROWS or size + own > _MOST_BYTES):
            yield some
            some, size = [], 0
        some.append(row)
        size += own
    yield some


def _encoded(row: dict[str, Any]) -> dict[str, Any]:
    """Return *row* for JSON; its headers as text, for they may hold a zero character."""
    payload = row["payload"]
    return {
        **row,
        "id": str(row["id"]),
        "headers": _json(row["headers"]).decode(),
        "payload": None if payload is None else b64encode(payload).decode(),
    }
