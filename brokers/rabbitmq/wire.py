"""Messages as AMQP 0-9-1 carries them; the package's docstring has the wire form."""

from __future__ import annotations

import struct
from base64 import b64decode
from copy import copy
from typing import TYPE_CHECKING, Any

from holdfast.cloudevents import rfc3339, to_wire
from holdfast.errors import InvalidMessage, MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.headers import HeaderValue, Pair
    from holdfast.message import Message

ORDER, NULL, DELIVERIES = "holdfast-order", "holdfast-null", "holdfast-deliveries"
_OWN = "holdfast-own-"
_COUNT = "x-delivery-count"
_PREFIX = "cloudEvents:"
_ID = _PREFIX + "id"
_KEY, _KEY64 = _PREFIX + "partitionkey", _PREFIX + "partitionkeybase64"
_NOT_OURS = frozenset((_COUNT, "x-death", "x-acquired-count"))
_HIDDEN = frozenset((ORDER, NULL, DELIVERIES)) | _NOT_OURS
_DEATH = ("x-first-death-", "x-last-death-")

_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_MESSAGE_ID, _TIMESTAMP = 1 << 7, 1 << 6
_PERSISTENT = b"\x02"
_LONGEST_SHORT = 255
_MILLISECONDS = 100_000_000_000  # seconds of the year 5138: foreign stamps beyond are finer

_size = struct.Struct(">I").pack
_flags = struct.Struct(">H").pack
_long = struct.Struct(">Q").pack

_ATTRIBUTES = (
    "specversion", "id", "type", "source", "time", "dataschema", "correlationid",
    "causationid", "traceparent", "partitionkey", "partitionkeybase64",
)  # fmt: skip
_HEADS = {
    f"ce_{name}": (slot, bytes((len(_PREFIX + name),)) + (_PREFIX + name).encode() + b"S")
    for slot, name in enumerate(_ATTRIBUTES)
}
_CONTENT_SLOT = len(_HEADS)
_HEADS["content-type"] = (_CONTENT_SLOT, b"\x0ccontent-typeS")
_NO_HEAD = (-1, b"")
_RESERVED = _HIDDEN | {_PREFIX + name for name in _ATTRIBUTES}


class Properties:
    """A content header that is already encoded; pika asks for no more than this."""

    __slots__ = ("_encoded",)
    INDEX = 0x003C

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        """Return the encoded properties, in a list that pika may change."""
        return [self._encoded]


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
    flags = _HEADERS | _DELIVERY_MODE | _TIMESTAMP
    pieces = [b"", _size(len(table)), table, _PERSISTENT]
    if content_type is not None:
        flags |= _CONTENT_TYPE
        pieces.insert(1, content_type)
    own = message.id.encode()
    if len(own) <= _LONGEST_SHORT:
        flags |= _MESSAGE_ID
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
    names = [_OWN + n if n in _RESERVED or n.startswith(_DEATH) else n for n, _ in pairs]
    values: dict[str, list[HeaderValue]] = {}
    for name, (_, value) in zip(names, pairs, strict=True):
        values.setdefault(name, []).append(value)
    pieces = [_array(n, v) if len(v) > 1 else _name(n) + _value(v[0]) for n, v in values.items()]
    if names != sorted(set(names)) or any(name.startswith(_OWN) for name in names):
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


def body_of(headers: dict[Any, Any], body: bytes) -> bytes | None:
    """Return the body, or None where the publisher said that it is null."""
    return None if not body and NULL in headers else body


def key_of(headers: dict[Any, Any]) -> bytes | None:
    """Return the key that the publisher gave."""
    text = headers.get(_KEY)
    if text is not None:
        return text.encode() if type(text) is str else _bytes(text)
    coded = headers.get(_KEY64)
    if coded is None:
        return None
    try:
        return b64decode(_bytes(coded) or b"", validate=True)
    except ValueError:
        return None  # a foreign header that only looks like ours


def count_of(headers: dict[Any, Any]) -> int:
    """Return which delivery of the message this is, from 1."""
    return 1 + _number(headers.get(_COUNT)) + _number(headers.get(DELIVERIES))


def stamp_of(properties: Any) -> float | None:
    """Return when the message was published, in POSIX seconds."""
    stamp = properties.timestamp
    if stamp is None:
        return None
    return float(stamp) if stamp < _MILLISECONDS else stamp / 1000


def pairs_of(properties: Any) -> list[Pair]:
    """Return the headers as they were given, and those that follow from foreign properties."""
    headers = properties.headers
    if headers and _ID in headers and _HIDDEN.isdisjoint(headers):
        try:  # as if every value were text; most often it is
            pairs = [(name, value.encode()) for name, value in headers.items()]
        except AttributeError:
            pairs = _any_pairs(headers)
    else:
        pairs = _shown(_any_pairs(headers or {}), headers or {})
        if not headers or _ID not in headers:
            pairs += _foreign(properties)
    if (kind := properties.content_type) is not None:
        pairs.insert(0, ("content-type", _bytes(kind)))
    return pairs


def _any_pairs(headers: dict[Any, Any]) -> list[Pair]:
    """Return headers of any type and origin as pairs; an array is a name that repeats."""
    pairs: list[Pair] = []
    for given, value in headers.items():
        name = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        if isinstance(value, list):
            pairs += [(name, _bytes(one)) for one in value]
        else:
            pairs.append((name, _bytes(value)))
    return pairs


def _shown(pairs: list[Pair], headers: dict[Any, Any]) -> list[Pair]:
    """Return *pairs* without what the broker and this adapter added, in their first order."""
    kept = [p for p in pairs if p[0] not in _HIDDEN and not p[0].startswith(_DEATH)]
    if ORDER not in headers:
        return kept
    values: dict[str, list[HeaderValue]] = {}
    for name, value in kept:
        values.setdefault(name, []).append(value)
    # From the end: where an attribute and a header share a name, the attribute comes first.
    order = reversed((_bytes(headers[ORDER]) or b"").decode("utf-8", "replace").split(" "))
    own = [(name, values[name].pop()) for name in order if values.get(name)]
    rest = [(name, value) for name, some in values.items() for value in some]
    return rest + [(name.removeprefix(_OWN), value) for name, value in reversed(own)]


def _foreign(properties: Any) -> list[Pair]:
    """Return what a publisher that does not know of CloudEvents says in properties."""
    pairs: list[Pair] = []
    for name, value in (
        ("id", properties.message_id),
        ("correlationid", properties.correlation_id),
        ("type", properties.type),
    ):
        if value:
            pairs.append((_PREFIX + name, _bytes(value)))
    return pairs


def _bytes(value: Any) -> HeaderValue:
    match value:
        case None | bytes():
            return value
        case str():
            return value.encode()
        case bool():
            return b"true" if value else b"false"
        case _ if hasattr(value, "tzinfo"):
            return rfc3339(value)
        case _ if isinstance(value, int):
            return b"%d" % value  # pika's long prints an L
        case _:
            return str(value).encode()


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) and value > 0 else 0


def postponed(properties: Any, position: str, count: int) -> Any:
    """Return the properties of a message that will be delivered for the time after *count*.

    It keeps its identity, even one that it has only by its position. RabbitMQ would drop a
    message whose record of deaths shows a circle, and one that names another user.
    """
    headers = {
        name: value
        for name, value in (properties.headers or {}).items()
        if name not in _NOT_OURS and not name.startswith(_DEATH)
    }
    later = copy(properties)
    later.headers = {**headers, DELIVERIES: count}
    later.message_id = position
    later.delivery_mode = 2
    later.expiration = later.user_id = None
    return later
