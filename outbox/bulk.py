"""Many rows of the outbox by one statement, in their order.

PostgreSQL takes each column as one text, and the payloads as they are, one after the other: of
all forms of many rows that costs both sides least.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, literal_column

from holdfast.db.sql import Inseparable, column_text, executed, statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Table
    from sqlalchemy.engine import Connection

    from holdfast.message import Message
    from holdfast.outbox.rows import Fields
    from holdfast.tracing.lineage import Lineage

_MOST_ROWS, _MOST_BYTES = 5000, 16_000_000
_SQLITE_ROWS = {"insertmanyvalues_page_size": 1000}
_json = msgspec.json.Encoder().encode


def insert_all(db: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert *rows* in their order: one statement for up to 5,000 rows or 16 MB on PostgreSQL.

    On SQLite it is one for 1,000 rows; the drivers of MySQL and MariaDB send one for as
    many as a packet holds.
    """
    dialect = db.dialect
    if len(rows) > 1 and dialect.name == "postgresql":
        with suppress(Inseparable):  # psycopg sends one statement per row then
            name = f"fill_{table.name}"
            dues = [row["due"] for row in rows] if "due" in rows[0] else None
            _insert(db, name, [_fields(row) for row in rows], dues=dues)
            return
    if len(rows) > 1 and dialect.name == "sqlite" and dialect.insert_executemany_returning:
        several: Any = insert(table).returning(literal_column("1"))  # which joins the rows
        db.execute(several, rows, execution_options=_SQLITE_ROWS)
    else:
        db.execute(insert(table), rows)


def insert_messages(
    db: Connection, messages: Sequence[Message], rows: Sequence[Fields], lineage: Lineage | None
) -> None:
    """Insert *rows*, those of *messages*, with their lineage if wanted: PostgreSQL only.

    Both take one round trip. Raises `Inseparable` before anything is inserted.
    """
    if lineage is None:
        _insert(db, "fill_holdfast_outbox", rows)
        return
    if any(row[0] != message.id for row, message in zip(rows, messages, strict=True)):
        raise Inseparable  # the lineage keeps an id as it was written
    _insert(db, "fill_with_lineage", rows, messages=messages, lineage=lineage)


def _insert(
    db: Connection,
    name: str,
    rows: Sequence[Fields],
    *,
    dues: Sequence[float] | None = None,
    messages: Sequence[Message] = (),
    lineage: Lineage | None = None,
) -> None:
    command = statements("holdfast.outbox", "postgresql")[name]
    told: list[dict[str, Any]] = []
    for start, end in _portions(rows):
        columns = _columns(rows[start:end])
        if dues is not None:
            columns["dues"] = column_text([repr(due) for due in dues[start:end]])
        if lineage is not None:
            columns |= lineage.staged(messages[start:end])
        told.append(columns)
    for columns in told:
        executed(db, command, columns)


def _portions(rows: Sequence[Fields]) -> Iterator[tuple[int, int]]:
    """Return where each statement's part of *rows* begins and ends."""
    start = size = 0
    for place, row in enumerate(rows):
        own = len(row[6] or b"")
        if place > start and (place - start == _MOST_ROWS or size + own > _MOST_BYTES):
            yield start, place
            start, size = place, 0
        size += own
    yield start, len(rows)


def _columns(rows: Sequence[Fields]) -> dict[str, Any]:
    """Return *rows* by column; what is the same in all of them is sent once."""
    ids, topics, keys, types, shards, headers, payloads = zip(*rows, strict=True)
    sizes = [None if one is None else len(one) for one in payloads]
    ends = accumulate(size or 0 for size in sizes)
    return {
        "ids": "\x1f".join(ids),
        "topics": column_text(topics) if (several_topics := len(set(topics)) > 1) else None,
        "topic": None if several_topics else topics[0],
        "keys": column_text(keys),
        "types": column_text(types) if (several_types := len(set(types)) > 1) else None,
        "type": None if several_types else types[0],
        "shards": "\x1f".join(map(str, shards)),
        "headers": "\x1f".join(headers),
        "sizes": column_text([None if size is None else str(size) for size in sizes]),
        "ends": "\x1f".join(map(str, ends)),
        "payloads": b"".join([one for one in payloads if one]),
    }


def _fields(row: dict[str, Any]) -> Fields:
    """Return a row of `values` as a statement for many takes it.

    JSON has no separators in it: it escapes them.
    """
    return (
        str(row["id"]), row["aggregatetype"], row["aggregateid"], row["type"], row["shard"],
        _json(row["headers"]).decode(), row["payload"],
    )  # fmt: skip
