"""Column values: from PostgreSQL's text to the JSON that Debezium would write.

| type | JSON |
|---|---|
| boolean | true or false |
| smallint, integer, bigint, oid | number |
| real, double precision | number; "NaN", "Infinity" and "-Infinity" as text |
| numeric, money | text, so that no digit is lost (Debezium: decimal.handling.mode=string) |
| bytea | text, base64 |
| json, jsonb | text, the document as written |
| date | number of days since 1970-01-01 |
| timestamp | number of microseconds since 1970-01-01, as if it were UTC |
| timestamp with time zone | text, ISO 8601 in UTC: 2026-01-31T10:20:30.123456Z |
| time | number of microseconds since midnight |
| arrays of these, of one dimension | array |
| everything else, and dates outside the years 1 to 9999 | text as PostgreSQL writes it |
"""

from __future__ import annotations

import base64
import math
import re
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETTINGS = "-c datestyle=ISO -c intervalstyle=postgres -c timezone=UTC -c extra_float_digits=1"
"""Options of a session whose text is read here."""

_DAY_ZERO = date(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ITEM = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}"]+)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def _float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _bytea(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


def _microseconds(moment: datetime) -> int:
    passed = moment - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _timestamp(text: str) -> int | str:
    try:
        return _microseconds(datetime.fromisoformat(text).replace(tzinfo=UTC))
    except ValueError:  # infinity, or before our era
        return text


def _timestamptz(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return text
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _date(text: str) -> int | str:
    try:
        return (date.fromisoformat(text) - _DAY_ZERO).days
    except ValueError:
        return text


def _time(text: str) -> int | str:
    try:
        moment = time.fromisoformat(text)
    except ValueError:  # 24:00:00
        return text
    seconds = (moment.hour * 60 + moment.minute) * 60 + moment.second
    return seconds * 1_000_000 + moment.microsecond


_CONVERTERS: dict[int, Callable[[str], Any]] = {
    16: lambda text: text == "t",
    17: _bytea,
    20: int, 21: int, 23: int, 26: int,
    700: _float, 701: _float,
    1082: _date, 1083: _time, 1114: _timestamp, 1184: _timestamptz,
}  # fmt: skip
_ELEMENTS = {
    1000: 16, 1001: 17, 1005: 21, 1007: 23, 1016: 20, 1028: 26, 1021: 700, 1022: 701,
    1182: 1082, 1183: 1083, 1115: 1114, 1185: 1184, 1009: 25, 1015: 1043, 1231: 1700, 2951: 2950,
}  # fmt: skip


def converter(kind: int) -> Callable[[str], Any]:
    """Return what turns the text of a column of type *kind* (its oid) into a JSON value."""
    if (element := _ELEMENTS.get(kind)) is not None:
        return _array(_CONVERTERS.get(element, str))
    return _CONVERTERS.get(kind, str)


def _array(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not text.startswith("{") or "{" in _outside_quotes(text[1:]):
            return text  # another lower bound, or more dimensions
        return [None if item is None else convert(item) for item in _items(text[1:-1])]

    return read


def _outside_quotes(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', "", text)


def _items(text: str) -> Iterator[str | None]:
    for found in _ITEM.finditer(text):
        if found[1] is not None:
            yield _ESCAPED.sub(r"\1", found[1])
        else:
            yield None if found[2] == "NULL" else found[2]
