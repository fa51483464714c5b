"""Dead letters as JSON lines and back: everything, with bytes in base64."""

from __future__ import annotations

from base64 import b64decode, b64encode
from datetime import datetime  # noqa: TC003 - msgspec resolves it at run time
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.db.text import plain_values
from holdfast.dlq.letter import (
    SCHEMA_VERSION,
    Coordinates,
    DeadLetter,
    FailedConsumer,
    Failure,
    Governance,
    LetterHistory,
    ReplayHistory,
)
from holdfast.errors import PoisonMessage
from holdfast.headers import Headers
from holdfast.message import Message

if TYPE_CHECKING:
    from holdfast.headers import HeaderValue


class _Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    topic: str
    type: str
    source: str
    time: datetime
    payload: str | None = None
    key: str | None = None
    headers: list[tuple[str, str | None]] = []
    correlation_id: str | None = None
    causation_id: str | None = None
    content_type: str | None = None
    schema: str | None = None
    traceparent: str | None = None


class _Exported(msgspec.Struct, kw_only=True, omit_defaults=True):
    schema_version: int
    dlq_id: str
    message: _Message
    coordinates: Coordinates
    culprit: FailedConsumer
    failure: Failure
    history: LetterHistory
    lineage: ReplayHistory = ReplayHistory()
    governance: Governance = Governance()
    origin: str = "captured"
    newer: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Exported).decode
_PLAIN = ("id", "topic", "type", "source", "time", "correlation_id", "causation_id",
          "content_type", "schema", "traceparent")  # fmt: skip
_PARTS = ("schema_version", "dlq_id", "coordinates", "culprit", "failure", "history", "lineage",
          "governance", "origin", "newer")  # fmt: skip


def to_json(letter: DeadLetter) -> bytes:
    """Return *letter* as one line of JSON."""
    own = letter.message
    message = _Message(
        payload=_text(own.payload),
        key=_text(own.key),
        headers=[(name, _text(value)) for name, value in own.headers],
        **{name: getattr(own, name) for name in _PLAIN},
    )
    parts = {name: getattr(letter, name) for name in _PARTS}
    whole = _Exported(message=message, **parts)
    try:
        return msgspec.json.encode(whole)
    except UnicodeEncodeError:  # JSON has no lone surrogates: they are made visible
        return msgspec.json.encode(plain_values(msgspec.to_builtins(whole)))


def from_json(line: bytes | str) -> DeadLetter:
    """Return the letter in *line*; `PoisonMessage` when there is none, or of a newer version."""
    try:
        found = _decode(line)
        if found.schema_version > SCHEMA_VERSION and found.newer is None:
            raise PoisonMessage(
                f"an export of version {found.schema_version}: upgrade Holdfast to read it"
            )
        own = found.message
        message = Message(
            payload=_bytes(own.payload),
            key=_bytes(own.key),
            headers=Headers.received((name, _bytes(value)) for name, value in own.headers),
            **{name: getattr(own, name) for name in _PLAIN},
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise PoisonMessage(f"not an exported dead letter: {error}") from error
    return DeadLetter(message=message, **{name: getattr(found, name) for name in _PARTS})


def _text(value: HeaderValue) -> str | None:
    return None if value is None else b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text, validate=True)
