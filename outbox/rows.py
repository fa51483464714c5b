"""Outbox rows and the messages they hold."""

from __future__ import annotations

import base64
import uuid
import zlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.cloudevents import to_wire
from holdfast.errors import InvalidMessage
from holdfast.outbox.schema import SHARDS
from holdfast.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.headers import Pair
    from holdfast.message import Message

_UNKNOWN = datetime.fromtimestamp(0, UTC)  # the wire headers carry the real time
_decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode
_LONGEST, _DASHED = 255, 36


class Row(NamedTuple):
    """An outbox row as the relay reads it; the fields are the columns of `read`."""

    seq: int
    shard: int
    topic: str
    key: str | None
    payload: bytes | None
    headers: str
    id: str
    type: str


def shard_of(topic: str, key: str | None, message_id: str) -> int:
    """Return the shard of a key: the same for every writer, so that one relay sees it all."""
    text = message_id if key is None else f"{topic}\x1f{key}"
    return zlib.crc32(text.encode()) % SHARDS


def values(message: Message) -> dict[str, Any]:
    """Return the column values of *message*; what the table cannot hold is refused here."""
    try:
        key = None if message.key is None else message.key.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(
            f"key {message.key!r} is not text: the outbox keeps keys as text, use str"
        ) from error
    for name, text in (("topic", message.topic), ("key", key), ("type", message.type)):
        if text is not None and len(text) > _LONGEST:
            raise InvalidMessage(f"{name} {text[:20]!r}… is longer than {_LONGEST} characters")
    return {
        "id": _uuid(message.id),
        "aggregatetype": message.topic,
        "aggregateid": key,
        "type": message.type,
        "payload": message.payload,
        "headers": header_values(to_wire(message)),
        "shard": shard_of(message.topic, key, message.id),
    }


def staged(row: Row) -> Staged:
    """Return the message of *row*, ready for a sink."""
    wire = wire_headers(row.headers)
    own = row.id if len(row.id) == _DASHED else str(uuid.UUID(row.id))
    if not wire or wire[0][0] != "ce_specversion":  # a row of somebody else's making
        wire = (("ce_id", own.encode()), ("ce_type", row.type.encode()), *wire)
    return Staged(
        id=own,
        topic=row.topic,
        payload=row.payload,
        key=None if row.key is None else row.key.encode(),
        type=row.type,
        time=_UNKNOWN,
        wire=wire,
    )


def header_values(pairs: Iterable[Pair]) -> list[list[Any]]:
    """Return *pairs* as the `headers` column keeps them."""
    return [[name, _text(value)] for name, value in pairs]


def wire_headers(text: str) -> tuple[Pair, ...]:
    """Return the headers in the `headers` column; of any JSON, so that no row stops a relay."""
    if text in ("{}", "[]", "null"):
        return ()
    try:
        return tuple(
            [
                (name, value.encode() if type(value) is str else _bytes(value))
                for name, value in _decode(text)
            ]
        )
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return _foreign(text)


def _foreign(text: str) -> tuple[Pair, ...]:
    """Return headers that another program wrote: an object by its names, else the text."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        found = None
    if not isinstance(found, dict):
        return (("headers", text.encode()),)
    return tuple(
        (name, value.encode() if isinstance(value, str) else msgspec.json.encode(value))
        for name, value in found.items()
    )


def _text(value: bytes | None) -> str | dict[str, str] | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _bytes(value: dict[str, str] | None) -> bytes | None:
    return None if value is None else base64.b64decode(value["base64"])


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise InvalidMessage(f"id {text!r} is not a UUID: leave it out to have one made") from error
