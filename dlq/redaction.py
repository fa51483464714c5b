"""What must not be kept: fields of payloads by path, and secrets in exception texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.urls import mask

REDACTED = "***"
_MOST_TEXT = 4_000
_MOST_VALUES = 200
_MOST_VALUE = 1_000
_LEAST_VALUE = 3  # a shorter one says nothing, and would take half of a text away
# Bounded repeats: hostile text costs linear time.
_SECRETS = re.compile(
    r"(?i)(?P<lead>\b[a-z0-9_.-]{0,40}(?:password|passwd|secret|token|api[_-]?key|credential)"
    r"[a-z0-9_.-]{0,40}[\"']?[ ]{0,3}[:=][ ]{0,3})(?:\"[^\"\n]{0,500}\"?|'[^'\n]{0,500}'?"
    r"|[^ ,;&\n\"')}]{1,500})"
    r"|(?P<bearer>\b(?:bearer|basic)[ ]{1,3})[A-Za-z0-9._~+/=-]{8,2000}"
    r"|(?P<jwt>\beyJ[A-Za-z0-9_-]{5,1000}\.)[A-Za-z0-9_-]{5,2000}(?:\.[A-Za-z0-9_-]{0,1000})?"
)


def scrubbed(text: str) -> str:
    """Return *text* without passwords, tokens and URL secrets; too long a text is cut first."""
    text = text[:_MOST_TEXT]
    if "://" in text or "=" in text:
        text = mask(text)
    return _SECRETS.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found['lead'] or found['bearer'] or ''}{REDACTED}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """Which payload fields are removed at capture, e.g. `Redaction(paths=("card.number",))`.

    A path names fields from the root, parted by dots; `*` stands for any one field or any
    item of a list. The values are gone: such a message can be replayed only after an edit
    that puts them back. To keep them readable for some, use a `Vault` instead.
    """

    paths: tuple[str, ...] = ()
    text: bool = True
    """Whether secrets are taken out of exception texts."""

    def __post_init__(self) -> None:
        for path in self.paths:
            parse_path(path)

    def apply(self, payload: bytes | None) -> tuple[bytes | None, tuple[str, ...]]:
        """Return *payload* without the fields, and the paths that were found."""
        return changed(payload, self.paths, lambda _: REDACTED)

    def scrub(self, text: str) -> str:
        """Return *text* as it may be kept."""
        return scrubbed(text) if self.text else text


SCRUBBED = Redaction()
"""Keeps the payload and takes secrets out of texts."""


def values_at(payload: bytes | None, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of the values at *paths*, the longest first, as an error may quote them."""
    found: set[str] = set()

    def note(value: Any) -> Any:
        waiting = [value]
        while waiting and len(found) < _MOST_VALUES:
            one = waiting.pop()
            if isinstance(one, dict):
                waiting += one.values()
            elif isinstance(one, list):
                waiting += one
            elif isinstance(one, (str, int, float)) and not isinstance(one, bool):
                found.add(str(one)[:_MOST_VALUE])
        return value

    changed(payload, paths, note)
    return tuple(sorted((text for text in found if len(text) >= _LEAST_VALUE), key=_longest))


def without(text: str, values: tuple[str, ...]) -> str:
    """Return *text* with *values* taken out."""
    for value in values:
        text = text.replace(value, REDACTED)
    return text


def _longest(text: str) -> tuple[int, str]:
    return -len(text), text


def parse_path(path: str) -> tuple[str, ...]:
    """Return the parts of *path*."""
    parts = tuple(path.removeprefix("$").strip(".").split("."))
    if not all(parts):
        raise ConfigurationError(
            f"path {path!r}: write field names parted by dots, e.g. card.number"
        )
    return parts


def changed(
    payload: bytes | None, paths: tuple[str, ...], change: Any
) -> tuple[bytes | None, tuple[str, ...]]:
    """Return *payload* with *change* applied to the values at *paths*, and where it applied.

    Where nothing applies the bytes are the very same. What is not JSON has no fields and
    passes as it is.
    """
    if payload is None or not paths:
        return payload, ()
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return payload, ()
    found: list[str] = []
    for path in paths:
        value = _at(value, parse_path(path), "", change, found)
    return (msgspec.json.encode(value), tuple(found)) if found else (payload, ())


def _at(value: Any, parts: tuple[str, ...], where: str, change: Any, found: list[str]) -> Any:
    if not parts:
        found.append(where.removeprefix("."))
        return change(value)
    first, rest = parts[0], parts[1:]
    if isinstance(value, dict):
        names = list(value) if first == "*" else [first] if first in value else []
        for name in names:
            value[name] = _at(value[name], rest, f"{where}.{name}", change, found)
    elif isinstance(value, list) and (first == "*" or first.isdecimal()):
        places = range(len(value)) if first == "*" else [int(first)]
        for place in places:
            if place < len(value):
                value[place] = _at(value[place], rest, f"{where}.{place}", change, found)
    return value
