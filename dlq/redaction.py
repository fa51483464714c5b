"""What must not be kept: fields of payloads by path, and secrets in exception texts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from holdfast.dlq.fields import WHOLE, changed, is_json, parse_path
from holdfast.scrubbing import REDACTED, scrubbed

_STARS = b'"***"'
_MOST_VALUES = 2_000
_LEAST_VALUE = 3  # a shorter one says nothing, and would take half of a text away
_PART = 16  # of a longer one also the beginning or the end are taken out
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
        if len(value) > _PART:
            text = _without_start(text, value)
            text = _without_start(text[::-1], value[::-1])[::-1]
    return text


def _without_start(text: str, value: str) -> str:
    start, at = value[:_PART], 0
    while (at := text.find(start, at)) >= 0:
        end = at + _PART
        while end < len(text) and text[end] == value[end - at : end - at + 1]:
            end += 1
        text = text[:at] + REDACTED + text[end:]
        at += len(REDACTED)
    return text


def _longest(text: str) -> tuple[int, str]:
    return -len(text), text
