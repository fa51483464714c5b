"""Messages as they go out; the package's docstring has the wire form."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from holdfast.cloudevents import to_wire
from holdfast.errors import InvalidMessage, MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.headers import HeaderValue, Pair
    from holdfast.message import Message

ORDER, NULL, DELIVERIES = "holdfast-order", "holdfast-null", "holdfast-deliveries"
NAMELESS = "holdfast-nameless"
OWN = "holdfast-own-"
PREFIX = "cloudEvents:"
COUNT = "x-delivery-count"
BROKERS_OWN = frozenset((COUNT, "x-death", "x-acquired-count"))
DEATH = ("x-first-death-", "x-last-death-")
HIDDEN = frozenset((ORDER, NULL, DELIVERIES, NAMELESS)) | BROKERS_OWN
"""Headers that are no part of the message."""

CONTENT_TYPE, HEADERS, DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
MESSAGE_ID, TIMESTAMP = 1 << 7, 1 << 6
"""Flags of the properties that a message has here."""

_PERSISTENT = b"\x02"
_LONGEST_SHORT = 255

_size = struct.Struct(">I").pack
_flags = struct.Struct(">H").pack
_long = struct.Struct(">Q").pack

_ATTRIBUTES = (
    "specversion", "id", "type", "source", "time", "dataschema", "correlationid",
    "causationid", "traceparent", "partitionkey", "partitionkeybase64",
)  # fmt: skip
_HEADS = {
    f"ce_{name}": (slot, bytes((len(PREFIX + name),)) + (PREFIX + name).encode() + b"S")
    for slot, name in enumerate(_ATTRIBUTES)
}
_CONTENT_SLOT = len(_HEADS)
_HEADS["content-type"] = (_CONTENT_SLOT, b"\x0ccontent-typeS")
_NO_HEAD = (-1, b"")
_RESERVED = HIDDEN | {PREFIX + name for name in _ATTRIBUTES}


class Properties:
    """Properties that are already encoded; pika asks for no more than this."""

    __slots__ = ("encoded",)
    INDEX = 0x003C

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    def encode(self) -> list[bytes]:
        """Return the encoded properties, in a list that pika may change."""
        return [self.encoded]


def sealed(
    message: Message, stamp: int, max_message: int, max_headers: int, deliveries: int = 0
) -> Properties:
    """Return the properties of *message*, sent at *stamp* in POSIX seconds."""
    content_type, table, size = _table(message, deliveries)
    if size > max_headers:
        raise MessageTooLarge(size, max_headers, "headers")
    size += len(message.payload or b"") + len(message.key or b"")
    if size > max_message:
        raise MessageTooLarge(size, max_message)
    flags = HEADERS | DELIVERY_MODE | TIMESTAMP
    pieces = [b"", _size(len(table)), table, _PERSISTENT]
    if content_type is not None:
        flags |= CONTENT_TYPE
        pieces.insert(1, content_type)
    own = message.id.encode()
    if len(own) <= _LONGEST_SHORT:
        flags |= MESSAGE_ID
        pieces += (bytes((len(own),)), own)
    pieces.append(_long(stamp))
    pieces[0] = _flags(flags)
    return Properties(b"".join(pieces))


def _table(message: Message, deliveries: int) -> tuple[bytes | None, bytes, int]:
    """Return the content type, the header table, and the bytes of names and values in it.

    The attributes come first and in a fixed order: where that ends, the own headers begin.
    """
    content_type = None
    pieces: list[bytes] = []
    size, last, count = 0, -1, 0
    pairs = to_wire(message)
    for name, value in pairs:
        slot, head = _HEADS.get(name, _NO_HEAD)
        if slot <= last or value is None:
            break
        last = slot
        count += 1
        if slot == _CONTENT_SLOT and len(value) <= _LONGEST_SHORT:
            content_type = bytes((len(value),)) + value
        else:
            pieces += (head, _size(len(value)), value)
            size += len(head) + len(value)
    if count < len(pairs):
        own = _own(pairs[count:])
        pieces.append(own)
        size += len(own)
    if message.payload is None:
        pieces.append(_name(NULL) + b"t\x01")
    if deliveries:
        pieces.append(_name(DELIVERIES) + b"l" + _long(deliveries))
    return content_type, b"".join(pieces), size


def _own(pairs: Sequence[Pair]) -> bytes:
    """Return the message's own headers, encoded: repeats as arrays, and their order."""
    names = [OWN + n if n in _RESERVED or n.startswith(DEATH) else n for n, _ in pairs]
    values: dict[str, list[HeaderValue]] = {}
    for name, (_, value) in zip(names, pairs, strict=True):
        values.setdefault(name, []).append(value)
    pieces = [_array(n, v) if len(v) > 1 else _name(n) + _value(v[0]) for n, v in values.items()]
    if names != sorted(set(names)) or any(name.startswith(OWN) for name in names):
        pieces.append(_name(ORDER) + _value(" ".join(names).encode()))
    return b"".join(pieces)


def _name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > _LONGEST_SHORT:
        raise InvalidMessage(f"header name {name[:20]!r}… has {len(encoded)} bytes, at most 255")
    return bytes((len(encoded),)) + encoded


def _value(value: HeaderValue) -> bytes:
    return b"V" if value is None else b"S" + _size(len(value)) + value


def _array(name: str, values: Iterable[HeaderValue]) -> bytes:
    items = b"".join(map(_value, values))
    return _name(name) + b"A" + _size(len(items)) + items
