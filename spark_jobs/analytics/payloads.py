"""What is in payloads, counted batch by batch: fields, their types, and their common values.

Only sums leave a batch, so memory and shuffle depend on how many different fields there are, not
on how many records. Of a field with very many values the most common of each batch are kept: a
value that separates failed from healthy payloads is common by nature.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from holdfast.dlq.protection.redaction import holds_credentials
from holdfast.scrubbing import REDACTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FACTS = pa.schema([
    ("group_id", pa.string()), ("path", pa.string()), ("what", pa.string()),
    ("value", pa.string()), ("n", pa.int64()),
])  # fmt: skip
FACTS_DDL = "group_id string, path string, what string, value string, n bigint"
USAGE = pa.schema([
    ("type", pa.string()), ("version", pa.string()), ("path", pa.string()), ("kind", pa.string()),
    ("n", pa.int64()), ("first", pa.float64()), ("last", pa.float64()),
])  # fmt: skip
USAGE_DDL = (
    "type string, version string, path string, kind string, n bigint, first double, last double"
)
_MOST_FIELDS, _MOST_DEPTH, _MOST_ITEMS, _MOST_VALUES, _MOST_VALUE = 200, 8, 20, 200, 60
_MOST_PAYLOAD = 1_000_000
_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def fields_of(payload: bytes | str | None) -> list[tuple[str, str, str]]:
    """Return path, type and value of each field of a JSON payload; each path and value once.

    What is no JSON has one field, `$`, that says so.
    """
    if payload is None:
        return [("$", "nothing", "")]
    if len(payload) > _MOST_PAYLOAD:
        return [("$", "large", "")]
    try:
        whole = msgspec.json.decode(payload)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return [("$", "not JSON", "")]
    found: dict[tuple[str, str, str], None] = {}
    _walk(whole, "$", 0, found)
    return list(found)


def _walk(value: Any, path: str, depth: int, found: dict[tuple[str, str, str], None]) -> None:
    if len(found) >= _MOST_FIELDS:
        return
    if isinstance(value, dict):
        found[path, "object", ""] = None
        if depth < _MOST_DEPTH:
            for name in sorted(value)[:_MOST_FIELDS]:
                _walk(value[name], f"{path}.{name[:100]}", depth + 1, found)
    elif isinstance(value, list):
        found[path, "array", ""] = None
        if depth < _MOST_DEPTH:
            for item in value[:_MOST_ITEMS]:
                _walk(item, f"{path}[]", depth + 1, found)
    else:
        text = "" if value is None else str(value).lower() if value is True or value is False \
            else str(value)[:_MOST_VALUE]  # fmt: skip
        found[path, _KINDS.get(type(value), "other"), text] = None


def counted_facts(
    batches: Iterable[pa.RecordBatch], hidden: frozenset[str] = frozenset()
) -> Iterator[pa.RecordBatch]:
    """Yield how many payloads of each group have which field and which value, batch by batch.

    Values of fields that are *hidden*, or whose names speak of credentials, are not told apart.
    """
    for batch in batches:
        names = batch.schema.names
        groups = batch.column("group_id").to_pylist() if "group_id" in names else None
        totals: Counter[str] = Counter()
        fields: Counter[tuple[str, str, str]] = Counter()
        values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for row, payload in enumerate(batch.column("payload").to_pylist()):
            group = groups[row] if groups is not None else ""
            totals[group] += 1
            seen = fields_of(payload)
            for path in {path for path, _, _ in seen}:
                fields[group, path, "present"] += 1
            for path, kind, value in seen:
                if kind not in ("object", "array"):
                    values[group, path][_shown(path, kind, value, hidden)] += 1
        rows = [(group, "", "records", "", n) for group, n in totals.items()]
        rows += [(group, path, what, "", n) for (group, path, what), n in fields.items()]
        for (group, path), common in values.items():
            rows += [
                (group, path, "value", value, n) for value, n in common.most_common(_MOST_VALUES)
            ]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(FACTS)
        yield pa.RecordBatch.from_arrays(
            [pa.array(one, field.type) for one, field in zip(columns, FACTS, strict=True)],
            schema=FACTS,
        )


def is_hidden(path: str, hidden: frozenset[str]) -> bool:
    """Whether the values of the field at *path* may not be shown."""
    return path in hidden or any(
        name in hidden or holds_credentials(name) for name in path.replace("[]", "").split(".")
    )


def _shown(path: str, kind: str, value: str, hidden: frozenset[str]) -> str:
    if kind == "null":
        return "null"
    return REDACTED if is_hidden(path, hidden) else value


def counted_usage(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield which types, versions and fields occur, how often and when, batch by batch."""
    for batch in batches:
        sums: dict[tuple[str, str, str, str], list[Any]] = {}
        columns = [
            batch.column(name).to_pylist() for name in ("type", "schema_ref", "payload", "at")
        ]
        for kind, version, payload, at in zip(*columns, strict=True):
            seen = {("", "event"), *((path, what) for path, what, _ in fields_of(payload))}
            for path, what in seen:
                key = (kind or "", version or "", path, what)
                known = sums.get(key)
                if known is None:
                    sums[key] = [1, at, at]
                    continue
                known[0] += 1
                if at is not None:
                    known[1] = at if known[1] is None else min(known[1], at)
                    known[2] = at if known[2] is None else max(known[2], at)
        rows = [(*key, *figures) for key, figures in sums.items()]
        arrays = list(zip(*rows, strict=True)) if rows else [()] * len(USAGE)
        yield pa.RecordBatch.from_arrays(
            [pa.array(one, field.type) for one, field in zip(arrays, USAGE, strict=True)],
            schema=USAGE,
        )
