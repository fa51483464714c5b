"""Change events as messages: Debezium's envelope, keys, topics and tombstones.

Column values: from PostgreSQL's text to the JSON that Debezium would write.

| type | JSON |
|---|---|
| boolean, bit(1) | true or false |
| smallint, integer, bigint, oid | number |
| real, double precision | number; "NaN", "Infinity" and "-Infinity" as text |
| numeric | text, so that no digit is lost (Debezium: decimal.handling.mode=string) |
| bytea | text, base64 |
| bit(n), bit varying | text, base64 of the bytes, the lowest first |
| json, jsonb | text, the document as written |
| date | number of days since 1970-01-01 |
| timestamp | number of microseconds since 1970-01-01, as if it were UTC |
| timestamp(0) to (3) | number of milliseconds |
| timestamp with time zone | text, ISO 8601 in UTC: 2026-01-31T10:20:30.123456Z |
| time | number of microseconds since midnight; of milliseconds for time(0) to (3) |
| time with time zone | text, in UTC: 10:20:30Z |
| interval | text, ISO 8601: P0Y0M1DT2H0M0S (Debezium: interval.handling.mode=string) |
| arrays of these, of one dimension | array |
| domains | what they are made of |
| all else, infinity, and dates outside the years 1 to 9999 | text as PostgreSQL writes it |
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.ids import derived_id
from holdfast.message import Message
from holdfast.outbox.cdc.events import UNAVAILABLE
from holdfast.outbox.wal.pgoutput import UNCHANGED
from holdfast.outbox.wal.protocol import EPOCH

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
class ChangeOrigin:
    """Where and when a change happened."""

    lsn: int
    tx: int | None
    time: datetime
    snapshot: str = "false"


def moment(microseconds: int) -> datetime:
    """Return the time that PostgreSQL writes as *microseconds* since 2000."""
    return EPOCH + timedelta(microseconds=microseconds)


class ChangeEnvelope:
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

    def read(self, shape: Shape, values: Values, origin: ChangeOrigin, number: int) -> Message:
        """Return the event of a row that the snapshot found."""
        row = shape.row(values)
        name = f"{shape.schema}.{shape.table}"
        return self._message(shape, "r", None, row, origin, f"{name}:{number}")

    def inserted(
        self, shape: Shape, new: Values, origin: ChangeOrigin, number: int
    ) -> Iterator[Message]:
        """Yield the event of a new row."""
        yield self._message(shape, "c", None, shape.row(new), origin, f"{number}")

    def updated(
        self, shape: Shape, told: Update, origin: ChangeOrigin, number: int
    ) -> Iterator[Message]:
        """Yield the event of a changed row; under a new key it is a delete and an insert."""
        before = None if told.old is None else shape.row(told.old)
        after = shape.row(told.new, told.old, whole=told.whole)
        if before is not None and shape.key_of(before) != shape.key_of(after):
            yield from self.deleted(shape, told.old or [], origin, number)
            yield self._message(shape, "c", None, after, origin, f"{number}:c")
        else:
            yield self._message(shape, "u", before, after, origin, f"{number}")

    def deleted(
        self, shape: Shape, old: Values, origin: ChangeOrigin, number: int
    ) -> Iterator[Message]:
        """Yield the event of a deleted row, and the tombstone that follows it."""
        gone = self._message(shape, "d", shape.row(old), None, origin, f"{number}")
        yield gone
        if gone.key is not None:
            yield gone.with_(id=derived_id(gone.id, "tombstone"), payload=None, content_type=None)

    def truncated(self, shape: Shape, origin: ChangeOrigin, number: int) -> Message:
        """Return the event of a table that was emptied at once; it has no key."""
        name = f"{number}:{shape.schema}.{shape.table}"
        return self._message(shape, "t", None, None, origin, name)

    def _message(
        self,
        shape: Shape,
        op: str,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
        origin: ChangeOrigin,
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


SETTINGS = "-c datestyle=ISO -c intervalstyle=iso_8601 -c timezone=UTC -c extra_float_digits=1"
"""Options of a session whose text is read here."""

_DAY_ZERO = date(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A quote without its end goes to the end: looking for it from each of many would take for ever.
_ITEM = re.compile(r'"((?:[^"\\]|\\.?)*+)"?|([^,{}"]+)', re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
_INTERVAL = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?[\d.]+)S)?)?"
)
_FINEST, _MILLISECONDS, _COARSE = 6, 3, frozenset({1083, 1114})
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def _float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _bytea(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


def _bits(text: str) -> str:
    number = int(text or "0", 2)
    return base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little")).decode()


def _microseconds(moment: datetime) -> int:
    passed = moment - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _timestamp(text: str) -> int | str:
    try:
        return _microseconds(datetime.fromisoformat(text).replace(tzinfo=UTC))
    except ValueError:  # infinity, or before our era
        return text


def _timestamptz(digits: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        try:
            moment = datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError):
            return text
        seconds, _, fraction = f"{moment:%Y-%m-%dT%H:%M:%S.%f}".rpartition(".")
        return f"{seconds:0>19}.{fraction[:digits]}Z" if digits else f"{seconds:0>19}Z"

    return read


def _date(text: str) -> int | str:
    try:
        return (date.fromisoformat(text) - _DAY_ZERO).days
    except ValueError:
        return text


def _time(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    whole, _, fraction = seconds.partition(".")
    return ((int(hours) * 60 + int(minutes)) * 60 + int(whole)) * 1_000_000 + int(f"{fraction:0<6}")


def _timetz(text: str) -> str:
    try:
        moment = datetime.combine(_EPOCH, time.fromisoformat(text)).astimezone(UTC)
    except ValueError:  # 24:00:00
        return text
    shown = moment.time().isoformat()
    return f"{shown.rstrip('0') if '.' in shown else shown}Z"


def _interval(text: str) -> str:
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return text
    years, months, days, hours, minutes, seconds = (part or "0" for part in found.groups())
    return f"P{years}Y{months}M{days}DT{hours}H{minutes}M{seconds}S"


def _milliseconds(read: Callable[[str], int | str]) -> Callable[[str], int | str]:
    def rounded(text: str) -> int | str:
        value = read(text)
        return value // 1000 if isinstance(value, int) else value

    return rounded


_CONVERTERS: dict[int, Callable[[str], Any]] = {
    16: lambda text: text == "t",
    17: _bytea,
    20: int, 21: int, 23: int, 26: int,
    25: str, 114: str, 1042: str, 1043: str, 1700: str, 2950: str, 3802: str,
    700: _float, 701: _float,
    1082: _date, 1083: _time, 1114: _timestamp, 1184: _timestamptz(_FINEST),
    1186: _interval, 1266: _timetz, 1560: _bits, 1562: _bits,
}  # fmt: skip
_BIT, _TIMESTAMPTZ = 1560, 1184


def scalar(kind: int, modifier: int = -1) -> Callable[[str], Any] | None:
    """Return what turns the text of a type that is no array, domain or enum into a JSON value.

    *kind* is its oid and *modifier* what was declared of it, as a precision; None if the type
    is not known here.
    """
    read = _CONVERTERS.get(kind)
    if kind == _BIT and modifier == 1:
        return lambda text: text == "1"
    if kind == _TIMESTAMPTZ and 0 <= modifier < _FINEST:
        return _timestamptz(modifier)
    if read is not None and kind in _COARSE and 0 <= modifier <= _MILLISECONDS:
        return _milliseconds(read)
    return read


def array(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what turns the text of an array into a JSON one; *convert* reads its elements."""

    def read(text: str) -> Any:
        if not text.startswith("{") or "{" in _outside_quotes(text[1:]):
            return text  # another lower bound, or more dimensions
        return [None if item is None else convert(item) for item in _items(text[1:-1])]

    return read


def _outside_quotes(text: str) -> str:
    return _QUOTED.sub("", text)


def _items(text: str) -> Iterator[str | None]:
    for found in _ITEM.finditer(text):
        if found[1] is not None:
            yield _ESCAPED.sub(r"\1", found[1])
        else:
            yield None if found[2] == "NULL" else found[2]
