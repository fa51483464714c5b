"""Reading outbox rows, in binary form where the driver can: half the work on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.binary_rows import in_binary
from holdfast.outbox.rows import as_row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection

    from holdfast.outbox.rows import Row


def read_rows(db: Connection, command: TextClause, where: Mapping[str, int | str]) -> list[Row]:
    """Return the rows that *command* finds; its columns are those of `Row`."""
    with in_binary(db):
        cursor: Any = db.execute(command, where).cursor
        return list(map(as_row, cursor.fetchall()))
