r"""Fingerprints, algorithm v1: which failures are the same problem.

This module needs nothing but Python's own library, so that every engine (the store, Spark,
a notebook) can use it or be held against it: `vectors.json` beside it has inputs and the
outputs that any implementation must give. Expressions use explicit ASCII classes, for \d
and \w differ between engines, and bounded repeats on capped text, so that hostile text
costs linear time. Hashes are SHA-256 of the group text in UTF-8.

Precedence: an explicit fingerprint; else the application's own frames by module and
function (never line numbers), with the exception types; else the exception types with the
parameterised text of the root cause.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALGORITHM = "v1"
MOST_TEXT = 400
"""Characters of an exception's text that are looked at."""
MOST_MASKED = 200
"""Characters that count once they are parameterised: a value cut in two has no say."""
MOST_FRAMES = 12
"""Frames of one exception that count: the innermost."""
MOST_RAISED = 4
"""Exceptions of a chain that count: those nearest to the root."""

_MASKS = (
    ("url", r"[a-z][a-z0-9+.-]{1,15}://[^ \t\n\r\"'<>)]{1,300}"),
    ("email", r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}"),
    (
        "uuid",
        r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    ),
    (
        "time",
        (
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
            r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?"
            r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?"
            r"|[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
        ),
    ),
    ("ip", r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?::[0-9]{1,5})?"),
    ("ip6", r"[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){7}"),
    (
        "hex",
        (
            r"0x[0-9a-fA-F]{1,64}|[0-9][0-9a-fA-F]{7,64}|[a-fA-F]{1,7}[0-9][0-9a-fA-F]{6,64}"
            r"|[0-9a-fA-F]{16,64}"
        ),
    ),
    ("number", r"[0-9]{1,40}(?:[.,][0-9]{1,40}){0,4}"),
)


@functools.lru_cache(maxsize=64)
def _expression(*present: str) -> re.Pattern[str]:
    """Return one expression of the masks that are *present*, in their order."""
    return re.compile("|".join(f"(?P<{n}>{p})" for n, p in _MASKS if n in present))


def _for(text: str) -> re.Pattern[str]:
    """Return the expression for *text*, without the masks that cannot occur: they cost most."""
    dashes, colons, dots = text.count("-"), text.count(":"), text.count(".")
    present = ["hex", "number"]
    if dots >= 3:
        present.append("ip")
    if dashes >= 2 or colons >= 1:
        present.append("time")
        if colons >= 7:
            present.append("ip6")
        if dashes >= 4:
            present.append("uuid")
        if "://" in text:
            present.append("url")
    if "@" in text:
        present.append("email")
    return _expression(*present)


# A number of eight digits reads as hexadecimal: one word for both, or ids would part by length.
_WORDS = {name: f"<{name}>" for name, _ in _MASKS} | {"ip6": "<ip>", "hex": "<n>", "number": "<n>"}
_QUOTED = re.compile(r"'[^'\n]{0,300}'|\"[^\"\n]{0,300}\"")
_LONGEST_QUOTE = 42
_SPACE = re.compile(r"[ \t\n\r\f\v]{1,300}")


class FrameCall(NamedTuple):
    """A frame as the rules see it."""

    module: str
    function: str
    in_app: bool


class Error(NamedTuple):
    """An exception as the rules see it: its type, its text, its frames outermost first."""

    type: str
    text: str
    frames: Sequence[FrameCall] = ()


class Fingerprint(NamedTuple):
    """Which problem it is, and why."""

    value: str
    """SHA-256 of `text`, in hexadecimal."""
    text: str
    """What was hashed."""
    by: str
    """explicit, stack or message."""
    hints: tuple[str, ...]
    """What contributed, for people."""
    algorithm: str = ALGORITHM


def fingerprint(
    chain: Sequence[Error], *, explicit: str | None = None, also: Iterable[str] = ()
) -> Fingerprint:
    """Return the fingerprint of a failure whose *chain* of exceptions has the root first.

    *also* holds the types of the other members of an exception group.
    """
    if explicit is not None:
        return _made("explicit", (explicit[:MOST_TEXT],), (f"given by the program: {explicit}",))
    errors = chain[:MOST_RAISED]
    members = tuple(f"+{name}" for name in sorted(set(also)))
    stacks = [own_calls(error.frames) for error in errors]
    if any(stacks):
        parts = tuple(
            f"{error.type}@{'>'.join(calls)}" for error, calls in zip(errors, stacks, strict=True)
        )
        hints = [f"type {error.type}" for error in errors]
        hints += [f"in {call}" for calls in stacks for call in calls[-3:]]
        return _made("stack", parts + members, tuple(hints))
    root = errors[0] if errors else Error("unknown", "")
    text = parameterised(root.text)
    types = tuple(error.type for error in errors) or ("unknown",)
    hints = [f"type {name}" for name in types] + [f"text {text}"]
    return _made("message", (*types, text, *members), tuple(hints))


def own_calls(frames: Iterable[FrameCall]) -> list[str]:
    """Return the application's own calls, innermost last; a recursion counts once."""
    calls: list[str] = []
    for frame in frames:
        if frame.in_app:
            name = f"{frame.module}:{frame.function}"
            if name in calls[-2:]:  # direct recursion, or two functions calling each other
                continue
            calls.append(name)
    return calls[-MOST_FRAMES:]


@functools.lru_cache(maxsize=4096)
def _parameterised(text: str) -> str:
    masked = _for(text).sub(_word, text)
    if "'" in masked or '"' in masked:
        masked = _QUOTED.sub(_quote, masked)
    if "  " in masked or not masked.isprintable():
        masked = _SPACE.sub(" ", masked)
    return masked.strip(" ")[:MOST_MASKED]


def parameterised(text: str) -> str:
    """Return *text* with what varies from message to message replaced by its kind."""
    return _parameterised(text[:MOST_TEXT])


def group_id(fingerprint: str, group: str, topic: str, handler: str) -> str:
    """Return the id of the failure group: one problem of one handler on one topic."""
    text = f"{fingerprint}\x1f{group}\x1f{topic}\x1f{handler}"
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


MOST_PAYLOAD = 262_144
"""Bytes of a payload that are looked into for its shape."""
_MOST_PATHS, _MOST_DEPTH, _MOST_ITEMS = 300, 8, 20
_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def shape(payload: bytes | None, schema: str | None = None) -> str:
    """Return a hash of the payload's form: paths and types of its JSON, not its values."""
    lines = _form(payload)
    if schema:
        lines = [f"schema {schema}", *lines]
    text = "\n".join(lines)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _form(payload: bytes | None) -> list[str]:
    if payload is None:
        return ["null"]
    if not payload:
        return ["empty"]
    if len(payload) > MOST_PAYLOAD:
        return ["large"]
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        try:
            payload.decode()
        except UnicodeDecodeError:
            return ["binary"]
        return ["text"]
    found: set[str] = set()
    _walk(value, "$", 0, found)
    return sorted(found)


def _walk(value: Any, path: str, depth: int, found: set[str]) -> None:
    if len(found) >= _MOST_PATHS:
        return
    if isinstance(value, dict):
        found.add(f"{path}:object")
        if depth < _MOST_DEPTH:
            for name in sorted(value)[:_MOST_PATHS]:
                _walk(value[name], f"{path}.{name[:100]}", depth + 1, found)
    elif isinstance(value, list):
        found.add(f"{path}:array")
        if depth < _MOST_DEPTH:
            for item in value[:_MOST_ITEMS]:
                _walk(item, f"{path}[]", depth + 1, found)
    else:
        found.add(f"{path}:{_KINDS[type(value)]}")


def _made(by: str, parts: tuple[str, ...], hints: tuple[str, ...]) -> Fingerprint:
    text = "\n".join((ALGORITHM, by, *parts))
    value = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return Fingerprint(value, text, by, hints)


def _word(found: re.Match[str]) -> str:
    return _WORDS[found.lastgroup or "number"]


def _quote(found: re.Match[str]) -> str:
    text = found[0]
    return "<text>" if len(text) > _LONGEST_QUOTE or "<" in text else text
