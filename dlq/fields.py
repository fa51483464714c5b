"""Fields of a JSON payload by path: only their own bytes change, all else stays as it was."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

WHOLE: Final = "$"
"""The path of the whole payload."""
_ANY: Final = None
_EMPTY: Final = r"\e"
_PART = re.compile(r"(?:[^.\\]|\\.)*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_SPECIAL = re.compile(r"([\\.*])")
_SPACE = re.compile(r"[ \t\n\r]*")
_scan = json.JSONDecoder().raw_decode
Parts = tuple[str | None, ...]


def changed(
    payload: bytes | None, paths: tuple[str, ...], change: Callable[[bytes], bytes]
) -> tuple[bytes | None, tuple[str, ...]]:
    """Return *payload* with *change* applied to the JSON text at *paths*, and where it applied.

    The places that are returned are paths too, of one field each. Where nothing applies the
    bytes are the very same. What is not JSON has no fields, only the `WHOLE`.
    """
    found: list[str] = []
    if payload is None:
        return payload, ()
    for path in paths:
        parts = parse_path(path)
        if not parts:
            payload = change(payload)
            found.append(WHOLE)
            continue
        text = _text(payload)
        if text is None:
            continue
        pieces, last = [], 0
        for place, begin, end in _places(text, _skip(text, 0), parts, ()):
            pieces += [text[last:begin], change(text[begin:end].encode()).decode()]
            found.append(_written(place))
            last = end
        if pieces:
            payload = ("".join(pieces) + text[last:]).encode()
    return payload, tuple(found)


def is_json(payload: bytes) -> bool:
    """Whether *payload* is JSON text whose fields can be told apart."""
    return _text(payload) is not None


def parse_path(path: str) -> Parts:
    r"""Return the parts of *path*, None for any one; none at all for `$`, the whole payload.

    Names are parted by dots; a backslash takes the meaning from a dot, a star or itself.
    """
    rest = path.removeprefix("$").removeprefix(".")
    if path == WHOLE:
        return ()
    parts: list[str | None] = []
    at = 0
    while at <= len(rest):
        found = _PART.match(rest, at)
        part = "" if found is None else found[0]
        at += len(part) + 1
        if not part or rest[at - 1 : at] not in ("", "."):
            raise ConfigurationError(
                f"path {path!r}: write field names parted by dots, e.g. card.number"
            )
        parts.append(_ANY if part == "*" else "" if part == _EMPTY else _ESCAPED.sub(r"\1", part))
    return tuple(parts)


def pattern(path: str) -> str:
    """Return a path that names *path* and every other item of its lists."""
    parts = parse_path(path)
    return _written(_ANY if part and part.isdecimal() else part for part in parts)


def _written(parts: Iterable[str | None]) -> str:
    names = ("*" if part is _ANY else _SPECIAL.sub(r"\\\1", part) or _EMPTY for part in parts)
    return ".".join(names) or WHOLE


def _text(payload: bytes) -> str | None:
    try:
        text = payload.decode()
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text


def _places(
    text: str, at: int, parts: Parts, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield place, begin and end of what *parts* name in the value that begins at *at*."""
    if text[at] not in "{[":
        return
    for name, begin, end in _members(text, at):
        if parts[0] is not _ANY and parts[0] != name:
            continue
        if len(parts) == 1:
            yield (*where, name), begin, end
        else:
            yield from _places(text, begin, parts[1:], (*where, name))


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield name or number, begin and end of each value in the object or list at *at*."""
    is_object = text[at] == "{"
    at = _skip(text, at + 1)
    number = 0
    while text[at] not in "}]":
        name = str(number)
        if is_object:
            name, at = _scan(text, at)
            at = _skip(text, _skip(text, at) + 1)
        begin = at
        _, at = _scan(text, at)
        yield name, begin, at
        number += 1
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
