"""Text from elsewhere as the columns of every database take it.

What is only read is escaped, then cut (`cut`, `storable`); what is looked up by is kept whole or
stands there as its digest (`fitted`), for two that are cut alike would be one.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, overload

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = 255
"""The length of a column for names."""
MOST_TEXT = 2000
"""Characters that are kept of what an error says."""
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def plain(text: str) -> str:
    """Return *text* without what PostgreSQL (NUL) or UTF-8 (lone surrogates) refuses."""
    if "\x00" in text:
        text = text.replace("\x00", "\\0")
    return text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text


@overload
def cut(text: str, most: int = NAME) -> str: ...
@overload
def cut(text: None, most: int = NAME) -> None: ...
@overload
def cut(text: str | None, most: int = NAME) -> str | None: ...
def cut(text: str | None, most: int = NAME) -> str | None:
    """Return *text* as a column of *most* characters takes it.

    Escaped before it is cut, for that makes it longer; and cut before, for its length is the
    sender's choice.
    """
    if text is None or (len(text) <= most and text.isascii() and "\0" not in text):
        return text
    return plain(text[:most])[:most]


def storable(text: str) -> str:
    """Return *text* as every database takes it, and no longer than anybody reads."""
    return plain(text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…")


def fitted(name: str, longest: int = NAME) -> str:
    """Return *name* as a text column takes it: one too long or not storable gives its digest."""
    if len(name) <= longest and "\0" not in name and name.isprintable():
        return name
    try:
        data = name.encode()
    except UnicodeEncodeError:
        data = name.encode("utf-8", "surrogatepass")
    else:
        if len(name) <= longest and "\0" not in name:
            return name
    return f"blake2b:{hashlib.blake2b(data, digest_size=32).hexdigest()}"[:longest]


def all_fit(names: Sequence[str], longest: int = NAME) -> bool:
    """Whether `fitted` is known to return each of *names* as it is: asked once for all of them."""
    if max(map(len, names), default=0) > longest:
        return False
    text = "".join(names)
    return "\0" not in text and (text.isprintable() or is_utf8(text))


def is_storable(text: str) -> bool:
    """Whether every database takes *text* as it is: no zero character, no lone surrogate."""
    return "\0" not in text and (text.isascii() or is_utf8(text))


def is_utf8(text: str) -> bool:
    """Whether *text* has no lone surrogates: a wire takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_values(value: Any) -> Any:
    """Return *value*, as JSON is made of it, with every text in it plain."""
    match value:
        case str():
            return plain(value)
        case dict():
            return {plain(str(name)): plain_values(one) for name, one in value.items()}
        case list() | tuple():
            return [plain_values(one) for one in value]
    return value


def ascii_only(text: str) -> str:
    """Return *text* in characters that every encoding of a database has."""
    return plain(text).encode("ascii", "backslashreplace").decode()


def document(value: Any) -> str:
    """Return *value* as JSON in ASCII, which every database takes.

    Lone surrogates, which JSON does not have, are made visible.
    """
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(plain_values(msgspec.to_builtins(value))).decode()
    return text if text.isascii() else _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
