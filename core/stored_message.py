"""Messages as rows keep them; the formats are those of the tables, and stay.

`StoredMessage`              a row of the outbox on its way to a broker, its headers still packed
`StoredMessages`             many of them, of which clients may take what they send and no more
`packed` / `unpacked`        headers as JSON of the outbox; any JSON is read: no row stops a relay
`header_text` / `headers_of` headers as JSON of the dead letters, exactly as they came
`header_bytes` / `pairs_of`  headers of parked messages, in MessagePack
`to_bytes` / `from_bytes`    a whole message in one column, with nothing lost
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import datetime  # noqa: TC003 - msgspec reads the annotations
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.db.text import document
from holdfast.headers import Headers
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy.engine import Connection

    from holdfast.errors import InvalidMessage
    from holdfast.headers import Pair


@contextmanager
def in_binary(db: Connection) -> Iterator[None]:
    """Let the statements of *db* answer in binary form inside the block.

    Only psycopg offers this; with other drivers, and databases, nothing changes.
    """
    raw: Any = db.connection.driver_connection if db.dialect.driver == "psycopg" else None
    if raw is None:
        yield
        return
    before = raw.cursor_factory
    raw.cursor_factory = _binary_cursor()
    try:
        yield
    finally:
        raw.cursor_factory = before  # the pool hands the connection to others


@cache
def _binary_cursor() -> type[Any]:
    from psycopg import Cursor, pq

    class BinaryCursor(Cursor[Any]):
        """Asks for binary results without being told each time."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.format = pq.Format.BINARY

    return BinaryCursor


_texts = msgspec.json.Decoder(list[tuple[str, str]]).decode
_values = msgspec.json.Decoder(list[tuple[str, Any]]).decode
_exact = msgspec.json.Decoder(list[tuple[str, str | dict[str, str] | None]]).decode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


class StoredMessage(Message, frozen=True, kw_only=True, gc=False):
    """A message of which a relay needs the wire form only.

    `packed` is the column `headers`: all headers in binary mode with the prefix `ce_`, as
    `to_wire` returned them when the event was staged. They are unpacked when they are
    sent and not before: pairs by the ten thousand would keep the garbage collector busy.
    """

    packed: str
    shard: int = 0
    """Of the outbox: whoever leases it may publish this message."""

    def __post_init__(self) -> None:
        """Trust the row: it was checked when it was staged."""

    @property
    def wire(self) -> tuple[Pair, ...]:
        """All headers that the message travels with."""
        pairs = unpacked(self.packed)
        if pairs and pairs[0][0] == "ce_specversion":
            return pairs
        # a row of somebody else's making
        return (("ce_id", self.id.encode()), ("ce_type", self.type.encode()), *pairs)

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """What `wire` holds with its values as text, or None where they are not all text.

        For clients that encode text themselves, which spares two objects a header.
        """
        return text_pairs(self.packed)


Record = tuple[str, bytes | None, str | bytes | None, Sequence[tuple[str, str | bytes | None]]]
"""What a client library sends of a message: topic, payload, key and headers."""


class StoredMessages(Sequence[StoredMessage]):
    """Stored messages that are made when they are asked for.

    A client library sends no more than topic, payload, key and headers: who hands it those
    takes `records`, and most messages of a backlog are never made at all.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def topics(self) -> list[str]:
        """The topic of each message."""

    @abstractmethod
    def records(self) -> Iterator[Record | InvalidMessage]:
        """Return what is sent of each message, or why it cannot be written."""


def topics_of(messages: Sequence[Message]) -> list[str]:
    """Return the topic of each of *messages*."""
    if isinstance(messages, StoredMessages):
        return messages.topics
    return [message.topic for message in messages]


def text_pairs(text: str) -> list[tuple[str, str]] | None:
    """Return the headers in the column `headers` where all is text and as Holdfast writes it.

    None also for a zero character: librdkafka's Python client cuts text there, bytes it
    leaves alone.
    """
    if "\\u0000" in text:
        return None
    try:
        pairs = _texts(text)
    except msgspec.MsgspecError:
        return None
    return pairs if pairs and pairs[0][0] == "ce_specversion" else None


def packed(pairs: Iterable[Pair]) -> list[list[Any]]:
    """Return *pairs* as the column `headers` keeps them."""
    pairs = list(pairs)
    try:
        return [[name, None if value is None else value.decode()] for name, value in pairs]
    except UnicodeDecodeError:
        return [[name, _text(value)] for name, value in pairs]


def unpacked(text: str) -> tuple[Pair, ...]:
    """Return the headers in the column `headers`; of any JSON, so that no row stops a relay."""
    try:
        return tuple([(name, value.encode()) for name, value in _texts(text)])
    except msgspec.MsgspecError:
        pass
    try:
        return tuple([(name, _bytes(value)) for name, value in _values(text)])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return _foreign(text)


def _foreign(text: str) -> tuple[Pair, ...]:
    """Return headers that another program wrote: an object by its names, else the text."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return (("headers", text.encode()),)
    if found is None:
        return ()
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


def _bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    return base64.b64decode(value["base64"])


def header_text(pairs: Iterable[Pair]) -> str:
    """Return *pairs* as JSON: a value is text, null, or {"base64": …} where it is not UTF-8."""
    return document([(name, _text(value)) for name, value in pairs])


def headers_of(text: str) -> Headers:
    """Return the headers in *text*, exactly as they came."""
    return Headers.received((name, _bytes(value)) for name, value in _exact(text))


def header_bytes(pairs: Iterable[Pair]) -> bytes:
    """Return *pairs* as bytes, which keep them as they are."""
    return _pack(list(pairs))


def pairs_of(content: bytes) -> list[Pair]:
    """Return the headers that `header_bytes` made *content* of."""
    return _unpack(content)


class _Kept(msgspec.Struct, array_like=True, omit_defaults=False):
    id: str
    topic: str
    payload: bytes | None
    type: str
    source: str
    key: bytes | None
    headers: list[tuple[str, bytes | None]]
    time: datetime
    correlation_id: str | None
    causation_id: str | None
    content_type: str | None
    schema: str | None
    traceparent: str | None


_decode = msgspec.msgpack.Decoder(_Kept).decode


def to_bytes(message: Message) -> bytes:
    """Return *message* as bytes."""
    return _pack(
        _Kept(
            message.id,
            message.topic,
            message.payload,
            message.type,
            message.source,
            message.key,
            list(message.headers),
            message.time,
            message.correlation_id,
            message.causation_id,
            message.content_type,
            message.schema,
            message.traceparent,
        )
    )


def from_bytes(content: bytes) -> Message:
    """Return the message that `to_bytes` made *content* of."""
    kept = _decode(content)
    fields = {name: getattr(kept, name) for name in _Kept.__struct_fields__}
    return Message(**{**fields, "headers": Headers(kept.headers)})
