"""Outbox rows out of pgoutput: one compiled reader per version of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.outbox.rows import Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.wal.pgoutput import Relation, Values

_SMALLINT, _INTEGER, _BIGINT, _UUID, _JSONB, _BYTEA = 21, 23, 20, 2950, 3802, 17
_COLUMNS = ("seq", "shard", "aggregatetype", "aggregateid", "payload", "headers", "id", "type")


def reader(relation: Relation) -> Callable[[Values], Row]:
    """Return what turns the values of *relation*, in binary format, into a row.

    Columns are found by name: users may add their own, in any place.
    """
    places = {column.name: place for place, column in enumerate(relation.columns)}
    missing = [name for name in _COLUMNS if name not in places]
    if missing:
        raise ConfigurationError(
            f"table {relation.schema}.{relation.name} is published without {', '.join(missing)}: "
            "publish all columns, or run  holdfast db upgrade"
        )
    types = {column.name: column.type for column in relation.columns}
    if [types[n] for n in ("seq", "headers", "id")] != [_BIGINT, _JSONB, _UUID]:
        return _any_reader(places, types)
    seq, shard, topic, key, payload, headers, id_, type_ = (places[name] for name in _COLUMNS)

    def read(values: Any) -> Row:
        own = values[id_].hex()
        key_ = values[key]
        return Row(
            int.from_bytes(values[seq]),
            int.from_bytes(values[shard]),
            values[topic].decode(),
            None if key_ is None else key_.decode(),
            values[payload],
            values[headers][1:].decode(),  # the first byte is the version of jsonb
            f"{own[:8]}-{own[8:12]}-{own[12:16]}-{own[16:20]}-{own[20:]}",
            values[type_].decode(),
        )

    return read


def _any_reader(places: dict[str, int], types: dict[str, int]) -> Callable[[Values], Row]:
    """Return the slower reader for a table of somebody's own making."""

    def read(values: Any) -> Row:
        return Row(*(_converted(values[places[name]], types[name], name) for name in _COLUMNS))

    return read


def _converted(value: bytes | None, kind: int, name: str) -> Any:
    if kind == _JSONB and value is not None:
        value = value[1:]
    if kind == _UUID and value is not None:
        return value.hex()
    if kind in (_SMALLINT, _INTEGER, _BIGINT) and value is not None:
        return int.from_bytes(value, signed=True)
    if name == "headers":
        return "[]" if value is None else value.decode()
    return value if name == "payload" or value is None else value.decode()
