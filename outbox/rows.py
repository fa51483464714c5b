"""Outbox rows and the messages they hold."""

from __future__ import annotations

import re
import uuid
import zlib
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from holdfast.cloudevents import ascii_list, to_wire
from holdfast.db.text import is_storable
from holdfast.errors import InvalidMessage
from holdfast.outbox.schema import SHARDS
from holdfast.stored_message import (
    StoredMessage,
    StoredMessages,
    in_binary,
    packed,
    text_pairs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection

    from holdfast.message import Message
    from holdfast.stored_message import Record

_UNKNOWN = datetime.fromtimestamp(0, UTC)  # the wire headers carry the real time
_LONGEST, _DASHED = 255, 36
_DASHES = re.compile("-".join(f"[0-9a-fA-F]{{{n}}}" for n in (8, 4, 4, 4, 12))).fullmatch
_json = msgspec.json.Encoder().encode


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


Cells = tuple[int, int, str, str | None, bytes | None, str, str, str]
"""A row as it was read, with the fields of `Row` in their order.

The collector of garbage looks at a plain tuple once, and at a named one again and again: so a
row of a backlog gets its names by `as_row` only where something is amiss with it.
"""
as_row = partial(tuple.__new__, Row)
"""What `Row._make` does, without a call in Python per row."""
_topic = itemgetter(2)


def shard_of(topic: str, key: str | None, message_id: str) -> int:
    """Return the shard of a key: the same for every writer, so that one relay sees it all."""
    text = message_id if key is None else f"{topic}\x1f{key}"
    return zlib.crc32(text.encode()) % SHARDS


def values(message: Message) -> dict[str, Any]:
    """Return the column values of *message*; what the table cannot hold is refused here."""
    key = _key(message)
    return {
        "id": _uuid(message.id),
        "aggregatetype": message.topic,
        "aggregateid": key,
        "type": message.type,
        "payload": message.payload,
        "headers": _headers(message),
        "shard": shard_of(message.topic, key, message.id),
    }


Fields = tuple[str, str, str | None, str, int, str, bytes | None]
"""A row to insert: id, topic, key, type, shard, headers as JSON, and the payload."""


def fields(message: Message) -> Fields:
    """Return what `values` does, as a statement for many rows takes it."""
    key, topic, own = _key(message), message.topic, message.id
    if _DASHES(own) is None:  # a form that PostgreSQL may not know
        own = str(_uuid(own))
    shard = shard_of(topic, key, message.id)
    headers = _json(_headers(message)).decode()
    return own, topic, key, message.type, shard, headers, message.payload


def _key(message: Message) -> str | None:
    """Return the key as the table keeps it, once all texts are known to fit."""
    try:
        key = None if message.key is None else message.key.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(
            f"key {message.key!r} is not text: the outbox keeps keys as text, use str"
        ) from error
    texts = f"{message.topic}{key}{message.type}"
    if len(texts) > _LONGEST or not is_storable(texts):  # else none of them can be refused
        _require_columns(topic=message.topic, key=key, type=message.type)
    return key


def _headers(message: Message) -> Sequence[Sequence[Any]]:
    headers: Sequence[Sequence[Any]] | None = ascii_list(message)
    return packed(to_wire(message)) if headers is None else headers


def _require_columns(**texts: str | None) -> None:
    for name, text in texts.items():
        if text is not None and len(text) > _LONGEST:
            raise InvalidMessage(f"{name} {text[:20]!r}… is longer than {_LONGEST} characters")
        if text is not None and not is_storable(text):
            raise InvalidMessage(
                f"{name} {text!r} holds a zero character or a lone surrogate: databases refuse both"
            )


def staged(row: Cells) -> StoredMessage:
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


class StagedRows(StoredMessages):
    """The messages of rows; all are made, once, when somebody walks through them."""

    __slots__ = ("_made", "_rows")

    def __init__(self, rows: Sequence[Cells]) -> None:
        self._rows = rows
        self._made: list[StoredMessage] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> StoredMessage: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[StoredMessage]: ...
    def __getitem__(self, place: int | slice) -> StoredMessage | Sequence[StoredMessage]:
        if isinstance(place, slice):
            return StagedRows(self._rows[place])
        return staged(self._rows[place]) if self._made is None else self._made[place]

    def __iter__(self) -> Iterator[StoredMessage]:
        if self._made is None:
            self._made = list(map(staged, self._rows))
        return iter(self._made)

    @property
    def topics(self) -> list[str]:
        """The topic of each message."""
        return list(map(_topic, self._rows))

    def records(self) -> Iterator[Record]:
        """Return what is sent of each message."""
        for row in self._rows:
            _, _, topic, key, payload, headers, _, _ = row
            pairs = text_pairs(headers)
            yield topic, payload, key, list(staged(row).wire) if pairs is None else pairs


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


def read_rows(db: Connection, command: TextClause, where: Mapping[str, int | str]) -> list[Cells]:
    """Return the rows that *command* finds; its columns are those of `Row`."""
    with in_binary(db):
        cursor: Any = db.execute(command, where).cursor
        return list(cursor.fetchall())


def size_of(rows: Sequence[Cells]) -> int:
    """Return the bytes of *rows*, as far as they vary."""
    payloads = sum([0 if (body := row[4]) is None else len(body) for row in rows])
    return payloads + sum([len(row[5]) for row in rows])
