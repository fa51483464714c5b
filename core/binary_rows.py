"""Rows in binary form where the driver can: half the work for the server and for us."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Connection


@contextmanager
def in_binary(db: Connection) -> Iterator[None]:
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
