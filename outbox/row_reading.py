"""Reading outbox rows, in binary form where the driver can: half the work on both sides."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from holdfast.outbox.rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection


_row = partial(tuple.__new__, Row)
"""What `Row._make` does, without a call in Python per row."""


def read_rows(db: Connection, command: TextClause, where: Mapping[str, int | str]) -> list[Row]:
    """Return the rows that *command* finds; its columns are those of `Row`."""
    with _in_binary(db):
        cursor: Any = db.execute(command, where).cursor
        return list(map(_row, cursor.fetchall()))


@contextmanager
def _in_binary(db: Connection) -> Iterator[None]:
    """Let the statements of *db* answer in binary form inside the block.

    Only psycopg offers this; with other drivers, and databases, nothing changes.
    """
    raw: Any = db.connection.driver_connection if db.dialect.driver == "psycopg" else None
    if raw is None:
        yield
        return
    before = raw.cursor_factory
    raw.cursor_factory = _binary_cursor()
    try:
        yield
    finally:
        raw.cursor_factory = before  # the pool hands the connection to others


@cache
def _binary_cursor() -> type[Any]:
    from psycopg import Cursor, pq

    class BinaryCursor(Cursor[Any]):
        """Asks for binary results without being told each time."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.format = pq.Format.BINARY

    return BinaryCursor
