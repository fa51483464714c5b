"""What must not be kept: fields of payloads by path, and secrets in exception texts.

Fields of a JSON payload by path: only their own bytes change, all else stays as it was.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigurationError
from holdfast.scrubbing import REDACTED, scrubbed

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


_STARS = b'"***"'
_MOST_VALUES = 2_000
_LEAST_VALUE = 3  # a shorter one says nothing, and would take half of a text away
_PATH_PART = 16  # of a longer one also the beginning or the end are taken out
_CREDENTIALS = re.compile(
    r"(?i)authorization|cookie|password|passwd|secret|token|credential|api[_-]?key"
)


def holds_credentials(name: str) -> bool:
    """Whether a header of this *name* holds credentials, which no screen shows."""
    return _CREDENTIALS.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """Which payload fields are removed at capture, e.g. `Redaction(paths=("card.number",))`.

    A path names fields from the root, parted by dots; `*` stands for any one field or any
    item of a list. The values are gone: such a message can be replayed only after an edit
    that puts them back. To keep them readable for some, use a `Vault` instead. A payload that
    is not JSON is removed whole: nobody can tell its fields apart.
    """

    paths: tuple[str, ...] = ()
    text: bool = True
    """Whether secrets are taken out of exception texts."""

    def __post_init__(self) -> None:
        for path in self.paths:
            parse_path(path)

    def apply(self, payload: bytes | None) -> tuple[bytes | None, tuple[str, ...]]:
        """Return *payload* without the fields, and the paths that were found."""
        return without_fields(payload, self.paths)

    def scrub(self, text: str) -> str:
        """Return *text* as it may be kept."""
        return scrubbed(text) if self.text else text


SCRUBBED = Redaction()
"""Keeps the payload and takes secrets out of texts."""


def without_fields(
    payload: bytes | None, paths: tuple[str, ...]
) -> tuple[bytes | None, tuple[str, ...]]:
    """Return *payload* with stars at *paths*, and where; all stars if it is not JSON."""
    return changed(payload, within(payload, paths), lambda _: _STARS)


def within(payload: bytes | None, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return *paths*, or the path of the whole *payload* if its fields cannot be told apart."""
    return (WHOLE,) if paths and payload and not is_json(payload) else paths


def redacted_in(payload: bytes | None, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of the redacted *paths* still lack their values: an edit may fill them."""
    kept = []
    for path in paths:
        found: list[bool] = []

        def look(value: bytes, found: list[bool] = found) -> bytes:
            found.append(value == _STARS)
            return value

        changed(payload, (path,), look)
        if any(found):
            kept.append(path)
    return tuple(kept)


def values_at(payload: bytes | None, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values at *paths* in every form that an error may quote, the longest first."""
    found: set[str] = set()

    def keep(number: str) -> str:
        if math.isfinite(value := float(number)):
            found.update((number, str(value)))
        return number

    def note(value: bytes) -> bytes:
        waiting: list[Any] = [json.loads(value, parse_float=keep)]
        while waiting and len(found) < _MOST_VALUES:
            one = waiting.pop()
            if isinstance(one, dict):
                waiting += one.values()
            elif isinstance(one, list):
                waiting += one
            elif isinstance(one, (str, int)) and not isinstance(one, bool):
                found.update(_quoted(str(one)))
        return value

    changed(payload, paths, note)
    return tuple(sorted((text for text in found if len(text) >= _LEAST_VALUE), key=_longest))


def _quoted(text: str) -> set[str]:
    """Return *text* as it is, as JSON writes it, and as Python writes either within quotes."""
    written = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    for one in tuple(written):
        raw = one.encode("utf-8", "surrogatepass")
        written |= {repr(one)[1:-1], ascii(one)[1:-1], repr(raw)[2:-1]}
    return written


def without(text: str, values: tuple[str, ...]) -> str:
    """Return *text* with *values* taken out, also where it quotes only an end of a long one."""
    for value in values:
        text = text.replace(value, REDACTED)
        if len(value) > _PATH_PART:
            text = _without_start(text, value)
            text = _without_start(text[::-1], value[::-1])[::-1]
    return text


def _without_start(text: str, value: str) -> str:
    start, at = value[:_PATH_PART], 0
    while (at := text.find(start, at)) >= 0:
        end = at + _PATH_PART
        while end < len(text) and text[end] == value[end - at : end - at + 1]:
            end += 1
        text = text[:at] + REDACTED + text[end:]
        at += len(REDACTED)
    return text


def _longest(text: str) -> tuple[int, str]:
    return -len(text), text
