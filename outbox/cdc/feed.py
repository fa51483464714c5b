"""Change events of the snapshot and of the stream, bounded and in commit order.

The snapshot has every row of the tables at the moment from which the stream goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from holdfast.outbox.cdc.envelope import SETTINGS, ChangeEnvelope, ChangeOrigin, Shape, moment
from holdfast.outbox.wal.errors import translated
from holdfast.outbox.wal.pgoutput import (
    Begin,
    Commit,
    Delete,
    Insert,
    Relation,
    Truncate,
    Update,
    decode,
)
from holdfast.outbox.wal.protocol import arguments
from holdfast.outbox.wal.reading import ConfirmedPosition
from holdfast.publishing import MOST_BYTES, BatchSizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from sqlalchemy.engine import URL

    from holdfast.message import Message
    from holdfast.outbox.cdc.tables import Kinds, Table
    from holdfast.outbox.wal.pgoutput import Message as Told
    from holdfast.outbox.wal.slot import Export


_BY_KEY = "di"  # replica identities of which the log itself tells the key


class Feed:
    """Takes pgoutput messages and gives the change events to publish."""

    def __init__(
        self,
        envelope: ChangeEnvelope,
        keys: Callable[[int], Sequence[str]],
        kinds: Kinds,
        *,
        most: int,
    ) -> None:
        self.marks = ConfirmedPosition()
        self._envelope = envelope
        self._keys = keys
        self._kinds = kinds
        self._most = most
        self._shapes: dict[int, Shape] = {}
        self._messages: list[Message] = []
        self._bytes = 0
        self._origin: ChangeOrigin | None = None
        self._number = 0

    @property
    def full(self) -> bool:
        """Whether to stop receiving until a batch is taken."""
        return len(self._messages) >= self._most or self._bytes >= MOST_BYTES

    @property
    def waiting(self) -> bool:
        """Whether events wait to be taken."""
        return bool(self._messages)

    def feed(self, data: bytes) -> None:
        """Take one pgoutput message."""
        told = decode(data)
        if isinstance(told, Begin):
            self._number = 0
            self._origin = ChangeOrigin(lsn=told.position, tx=told.xid, time=moment(told.time))
        elif isinstance(told, Commit):
            self._origin = None
            self.marks.mark(told.end)
        elif isinstance(told, Relation):
            self._learn(told)
        else:
            for message in self._events(told):
                self._messages.append(message)
                self._bytes += len(data)
                self.marks.count += 1

    def _learn(self, relation: Relation) -> None:
        read = self._kinds.converter
        columns = [(one.name, read(one.type, one.modifier)) for one in relation.columns]
        # The table may have changed since; the catalog is asked only where the log is silent.
        flagged = [column.name for column in relation.columns if column.key]
        key = flagged if relation.identity in _BY_KEY else self._keys(relation.id)
        self._shapes[relation.id] = Shape.of(relation.schema, relation.name, columns, key)

    def _events(self, told: Told) -> Iterator[Message]:
        if (origin := self._origin) is None:
            return
        self._number += 1
        envelope, shapes, number = self._envelope, self._shapes, self._number
        match told:
            case Insert():
                yield from envelope.inserted(shapes[told.relation], told.new, origin, number)
            case Update():
                yield from envelope.updated(shapes[told.relation], told, origin, number)
            case Delete():
                yield from envelope.deleted(shapes[told.relation], told.old, origin, number)
            case Truncate():
                for relation in told.relations:
                    yield envelope.truncated(shapes[relation], origin, number)

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent; inside a transaction it says nothing."""
        if self._origin is None:
            self.marks.mark(end)

    def take(self) -> list[Message]:
        """Return everything that waits."""
        taken, self._messages, self._bytes = self._messages, [], 0
        return taken


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
        envelope: ChangeEnvelope,
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
        self._sizer = BatchSizer(batch)
        self._origin = ChangeOrigin(lsn=export.position, tx=None, time=now, snapshot="true")
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
            most = sql.Literal(self._sizer.rows)
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
            self._sizer.came(len(messages), sum(len(one.payload or b"") for one in messages))
            yield messages
        self._db.execute("CLOSE rows")

    def close(self) -> None:
        """End the transaction and let the exported snapshot go."""
        self._db.close()
        self._export.close()
