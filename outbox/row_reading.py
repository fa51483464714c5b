"""Reading outbox rows, in binary form where the driver can: half the work on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.binary_rows import in_binary
from holdfast.outbox.rows import as_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection

    from holdfast.outbox.rows import Row


def read_rows(db: Connection, command: TextClause, where: Mapping[str, int | str]) -> list[Row]:
    """Return the rows that *command* finds; its columns are those of `Row`."""
    with in_binary(db):
        cursor: Any = db.execute(command, where).cursor
        return list(map(as_row, cursor.fetchall()))


def size_of(rows: Sequence[Row]) -> int:
    """Return the bytes of *rows*, as far as they vary."""
    payloads = sum([0 if (body := row[4]) is None else len(body) for row in rows])
    return payloads + sum([len(row[5]) for row in rows])
