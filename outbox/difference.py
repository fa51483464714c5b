"""What an edit changed, told without telling the values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 200  # paths; an edit that changes more is a replacement

Change = dict[str, str]


def digest(payload: bytes | None) -> str | None:
    """Return the SHA-256 of *payload*, by which two versions can be told apart."""
    return None if payload is None else hashlib.sha256(payload).hexdigest()


def changes(before: bytes | None, after: bytes | None) -> list[Change]:
    """Return the JSON paths that differ; what is not JSON is replaced as a whole."""
    if before == after:
        return []
    try:
        old, new = msgspec.json.decode(before or b""), msgspec.json.decode(after or b"")
        found = list(_compared("$", old, new))
    except (ValueError, RecursionError):
        return [{"path": "$", "change": "replaced"}]
    if len(found) > _MOST:
        return [*found[:_MOST], {"path": "…", "change": f"{len(found) - _MOST} more"}]
    return found or [{"path": "$", "change": "rewritten"}]  # same values, other bytes


def _compared(path: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _member(f"{path}.{name}", name, old, new)
    elif isinstance(old, list) and isinstance(new, list):
        for number in range(max(len(old), len(new))):
            yield from _item(f"{path}[{number}]", number, old, new)
    elif type(old) is not type(new) or old != new:
        yield {"path": path, "change": "changed"}


def _member(path: str, name: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    if name not in new:
        yield {"path": path, "change": "removed"}
    elif name not in old:
        yield {"path": path, "change": "added"}
    else:
        yield from _compared(path, old[name], new[name])


def _item(path: str, number: int, old: list[Any], new: list[Any]) -> Iterator[Change]:
    if number >= len(new):
        yield {"path": path, "change": "removed"}
    elif number >= len(old):
        yield {"path": path, "change": "added"}
    else:
        yield from _compared(path, old[number], new[number])
