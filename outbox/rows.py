"""Outbox rows and the messages they hold."""

from __future__ import annotations

import uuid
import zlib
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.cloudevents import to_wire
from holdfast.db.text import is_storable
from holdfast.errors import InvalidMessage
from holdfast.outbox.schema import SHARDS
from holdfast.stored_message import StoredMessage, in_binary, packed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection

    from holdfast.message import Message

_UNKNOWN = datetime.fromtimestamp(0, UTC)  # the wire headers carry the real time
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


as_row = partial(tuple.__new__, Row)
"""What `Row._make` does, without a call in Python per row."""


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
        if text is not None and not is_storable(text):
            raise InvalidMessage(
                f"{name} {text!r} holds a zero character or a lone surrogate: databases refuse both"
            )
    return {
        "id": _uuid(message.id),
        "aggregatetype": message.topic,
        "aggregateid": key,
        "type": message.type,
        "payload": message.payload,
        "headers": packed(to_wire(message)),
        "shard": shard_of(message.topic, key, message.id),
    }


def staged(row: Row) -> StoredMessage:
    """Return the message of *row*, ready for a sink."""
    _, shard, topic, key, payload, headers, own, kind = row
    return StoredMessage(
        id=own if len(own) == _DASHED else _dashed(own),
        topic=topic,
        payload=payload,
        key=None if key is None else key.encode(),
        type=kind,
        time=_UNKNOWN,
        packed=headers,
        shard=shard,
    )


def _dashed(own: str) -> str:
    try:
        return str(uuid.UUID(own))
    except ValueError:  # of somebody else's making, where the column is plain text
        return own


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise InvalidMessage(f"id {text!r} is not a UUID: leave it out to have one made") from error


def read_rows(db: Connection, command: TextClause, where: Mapping[str, int | str]) -> list[Row]:
    """Return the rows that *command* finds; its columns are those of `Row`."""
    with in_binary(db):
        cursor: Any = db.execute(command, where).cursor
        return list(map(as_row, cursor.fetchall()))


def size_of(rows: Sequence[Row]) -> int:
    """Return the bytes of *rows*, as far as they vary."""
    payloads = sum([0 if (body := row[4]) is None else len(body) for row in rows])
    return payloads + sum([len(row[5]) for row in rows])
