"""Change events as messages: Debezium's envelope, keys, topics and tombstones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.ids import derived_id
from holdfast.message import Message
from holdfast.outbox.changes import UNAVAILABLE
from holdfast.outbox.wal.frames import EPOCH
from holdfast.outbox.wal.pgoutput import UNCHANGED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.outbox.wal.pgoutput import Update, Value, Values

JSON = "application/json"
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_encode = msgspec.json.Encoder().encode


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:  # run from a folder
        return "0"


_VERSION = _version()


@dataclass(frozen=True, slots=True)
class Shape:
    """A table as it is at one moment: its columns, how to read them, which are the key."""

    schema: str
    table: str
    names: tuple[str, ...]
    converters: tuple[Callable[[str], Any], ...]
    key: tuple[int, ...]
    """Places of the key's columns; empty for a table without one."""

    @classmethod
    def of(
        cls,
        schema: str,
        table: str,
        columns: Sequence[tuple[str, Callable[[str], Any]]],
        key: Sequence[str],
    ) -> Shape:
        """Return the shape of a table with *columns*, how to read each, and the *key* columns."""
        names = tuple(name for name, _ in columns)
        return cls(
            schema,
            table,
            names,
            tuple(convert for _, convert in columns),
            tuple(place for place, name in enumerate(names) if name in key),
        )

    def row(
        self, values: Values, old: Values | None = None, *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the row as JSON; what the server did not send is taken from *old* if there.

        Unless it is the *whole* old row it holds the key alone: the rest stays unavailable.
        """
        if old is not None and UNCHANGED in values:
            known = range(len(old)) if whole else self.key
            values = [
                old[place] if value is UNCHANGED and place in known else value
                for place, value in enumerate(values)
            ]
        read = zip(self.names, values, self.converters, strict=True)
        return {name: _json(value, convert) for name, value, convert in read}

    def key_of(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the key's columns of *row*; None where the table has no key."""
        return {self.names[place]: row[self.names[place]] for place in self.key} or None


def _json(value: Value, convert: Callable[[str], Any]) -> Any:
    if value is None:
        return None
    return UNAVAILABLE if value is UNCHANGED else convert(value.decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where and when a change happened."""

    lsn: int
    tx: int | None
    time: datetime
    snapshot: str = "false"


def moment(microseconds: int) -> datetime:
    """Return the time that PostgreSQL writes as *microseconds* since 2000."""
    return EPOCH + timedelta(microseconds=microseconds)


class Envelope:
    """Makes the messages of one server's changes.

    The id of a message follows from the change's place in the log, so a change that is
    published again after a crash is a duplicate and not another event.
    """

    def __init__(self, server: str, database: str) -> None:
        self.server = server
        self._database = database

    def topic(self, schema: str, table: str) -> str:
        """Return `server.schema.table`, with _ for what a topic's name may not hold."""
        return _UNFIT.sub("_", f"{self.server}.{schema}.{table}")

    def read(self, shape: Shape, values: Values, origin: Origin, number: int) -> Message:
        """Return the event of a row that the snapshot found."""
        row = shape.row(values)
        name = f"{shape.schema}.{shape.table}"
        return self._message(shape, "r", None, row, origin, f"{name}:{number}")

    def inserted(self, shape: Shape, new: Values, origin: Origin, number: int) -> Iterator[Message]:
        """Yield the event of a new row."""
        yield self._message(shape, "c", None, shape.row(new), origin, f"{number}")

    def updated(self, shape: Shape, told: Update, origin: Origin, number: int) -> Iterator[Message]:
        """Yield the event of a changed row; under a new key it is a delete and an insert."""
        before = None if told.old is None else shape.row(told.old)
        after = shape.row(told.new, told.old, whole=told.whole)
        if before is not None and shape.key_of(before) != shape.key_of(after):
            yield from self.deleted(shape, told.old or [], origin, number)
            yield self._message(shape, "c", None, after, origin, f"{number}:c")
        else:
            yield self._message(shape, "u", before, after, origin, f"{number}")

    def deleted(self, shape: Shape, old: Values, origin: Origin, number: int) -> Iterator[Message]:
        """Yield the event of a deleted row, and the tombstone that follows it."""
        gone = self._message(shape, "d", shape.row(old), None, origin, f"{number}")
        yield gone
        if gone.key is not None:
            yield gone.with_(id=derived_id(gone.id, "tombstone"), payload=None, content_type=None)

    def truncated(self, shape: Shape, origin: Origin, number: int) -> Message:
        """Return the event of a table that was emptied at once; it has no key."""
        name = f"{number}:{shape.schema}.{shape.table}"
        return self._message(shape, "t", None, None, origin, name)

    def _message(
        self,
        shape: Shape,
        op: str,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
        origin: Origin,
        number: str,
    ) -> Message:
        at = int(origin.time.timestamp() * 1000)
        source = {
            "version": _VERSION,
            "connector": "postgresql",
            "name": self.server,
            "ts_ms": at,
            "snapshot": origin.snapshot,
            "db": self._database,
            "schema": shape.schema,
            "table": shape.table,
            "txId": origin.tx,
            "lsn": origin.lsn,
        }
        body = {"before": before, "after": after, "source": source, "op": op, "ts_ms": at}
        row = before if after is None else after
        key = None if row is None else shape.key_of(row)
        return Message(
            id=derived_id("cdc", self.server, self._database, str(origin.lsn), number),
            topic=self.topic(shape.schema, shape.table),
            payload=_encode(body),
            type="change",
            source=f"cdc:{self.server}",
            key=None if key is None else _encode(key),
            time=origin.time.astimezone(UTC),
            content_type=JSON,
        )
