"""The snapshot: every row of the tables at the moment from which the stream goes on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from holdfast.outbox.cdc.envelope import Envelope, Origin, Shape
from holdfast.outbox.cdc.values import SETTINGS
from holdfast.outbox.portion import Portion
from holdfast.outbox.wal.faults import translated
from holdfast.outbox.wal.stream import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from sqlalchemy.engine import URL

    from holdfast.message import Message
    from holdfast.outbox.cdc.kinds import Kinds
    from holdfast.outbox.cdc.tables import Table
    from holdfast.outbox.wal.slot import Export

log = logging.getLogger("holdfast.outbox.cdc")

_ALL_ROWS = "-c row_security=off"  # an error where a policy would hide rows
_COLUMNS = """
    SELECT attname FROM pg_attribute WHERE attrelid = CAST(%s AS oid) AND attnum > 0
    AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""  # what the stream tells: it leaves generated columns out


class TableSnapshot:
    """Reads the tables one after the other, in one transaction, in bounded batches."""

    def __init__(
        self,
        url: URL,
        export: Export,
        tables: Sequence[Table],
        envelope: Envelope,
        keys: Callable[[int], Sequence[str]],
        kinds: Kinds,
        *,
        now: datetime,
        batch: int,
    ) -> None:
        self.rows = 0
        """How many rows were read so far."""
        self._export = export
        self._envelope = envelope
        self._keys = keys
        self._kinds = kinds
        self._portion = Portion(batch)
        self._origin = Origin(lsn=export.position, tx=None, time=now, snapshot="true")
        with translated("taking the snapshot"):
            self._db: psycopg.Connection[Any] = psycopg.connect(
                **{**arguments(url), "options": f"{SETTINGS} {_ALL_ROWS}"}, autocommit=True
            )
            self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._db.execute(
                sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(export.snapshot))
            )
        self._batches = self._read_all(tables)

    @property
    def export(self) -> Export:
        """What the snapshot belongs to; its slot goes when it is closed."""
        return self._export

    def read(self) -> list[Message]:
        """Return the next events; an empty list after the last."""
        with translated("reading the snapshot"):
            return next(self._batches, [])

    def _read_all(self, tables: Sequence[Table]) -> Iterator[list[Message]]:
        for number, table in enumerate(tables, 1):
            before = self.rows
            yield from self._read_table(table)
            log.info(
                "snapshot of %s: %d rows (table %d of %d)",
                table.quoted, self.rows - before, number, len(tables),
            )  # fmt: skip

    def _read_table(self, table: Table) -> Iterator[list[Message]]:
        listed = [sql.Identifier(name) for (name,) in self._db.execute(_COLUMNS, [table.oid])]
        self._db.execute(
            sql.SQL("DECLARE rows NO SCROLL CURSOR FOR SELECT {} FROM {}").format(
                sql.SQL(", ").join(listed), sql.Identifier(table.schema, table.name)
            )
        )
        fetch = sql.SQL("FETCH FORWARD {} FROM rows")
        shape: Shape | None = None
        number = 0
        while True:
            most = sql.Literal(self._portion.rows)
            result = self._db.execute(fetch.format(most)).pgresult
            if result is None or result.ntuples == 0:
                break
            width = range(result.nfields)
            if shape is None:
                read = self._kinds.converter
                columns = [
                    ((result.fname(n) or b"").decode(), read(result.ftype(n), result.fmod(n)))
                    for n in width
                ]
                shape = Shape.of(table.schema, table.name, columns, self._keys(table.oid))
            messages = []
            for place in range(result.ntuples):
                number += 1
                values: list[Any] = [result.get_value(place, n) for n in width]
                messages.append(self._envelope.read(shape, values, self._origin, number))
            self.rows += len(messages)
            self._portion.came(len(messages), sum(len(one.payload or b"") for one in messages))
            yield messages
        self._db.execute("CLOSE rows")

    def close(self) -> None:
        """End the transaction and let the exported snapshot go."""
        self._db.close()
        self._export.close()
