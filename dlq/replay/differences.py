"""What changed between two revisions of a message, for people to read."""

from __future__ import annotations

import difflib
import hashlib
from typing import TYPE_CHECKING

import msgspec

from holdfast.dlq.redaction import holds_credentials
from holdfast.scrubbing import REDACTED

if TYPE_CHECKING:
    from holdfast.message import Message

_MOST_DIFFERENCE = 20_000


def difference(before: Message, after: Message) -> str:
    """Return what changed, line by line; JSON is laid out first, other bytes are told by size."""
    lines = difflib.unified_diff(_lines(before), _lines(after), "before", "after", lineterm="", n=2)
    text = "\n".join(lines)
    return text if len(text) <= _MOST_DIFFERENCE else f"{text[:_MOST_DIFFERENCE]}\n… (cut)"


def _lines(message: Message) -> list[str]:
    headers = [f"{name}: {_readable(name, value)}" for name, value in message.headers]
    payload = message.payload
    if payload is None:
        return [*headers, "(tombstone)"]
    try:
        body = msgspec.json.format(payload, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _shown(payload)
    return [*headers, *body.splitlines()]


def _readable(name: str, value: bytes | None) -> str:
    """Return the value of a header; of credentials only enough to tell that they changed."""
    if not value or not holds_credentials(name):
        return _shown(value)
    return f"{REDACTED} ({hashlib.sha256(value).hexdigest()[:8]})"


def _shown(value: bytes | None) -> str:
    if value is None:
        return "(none)"
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes: {value[:64].hex()}…)"
