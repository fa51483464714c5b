"""Messages as they go out; the package's docstring has the wire form.

The identity of messages that came without a `message_id`.

AMQP 0-9-1 gives a message in a queue no coordinates: a delivery tag is new each time. What
stays the same over redeliveries is what the publisher said, so the identity follows from that:
body, headers and properties, without what brokers add on the way. The price is that two
messages which are alike in everything, the `timestamp` property included, are one and the same
to whoever remembers ids.

Messages as they come in, from here or from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
from base64 import b64decode
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.cloudevents import rfc3339, to_wire
from holdfast.errors import InvalidMessage, MessageTooLarge
from holdfast.extras import driver

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


_SAID = (
    "content_type", "content_encoding", "priority", "correlation_id", "reply_to", "timestamp",
    "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip


def content_identity(properties: Any, body: bytes, key: bytes) -> str:
    """Return the same text for the same message, however often and in whatever form it comes.

    With a *key*, nobody else can tell from it what the message said.
    """
    headers = {
        name: value
        for name, value in (properties.headers or {}).items()
        if name not in BROKERS_OWN and not str(name).startswith(DEATH)
    }
    said = [getattr(properties, name) for name in _SAID]
    content = _canonical([headers, said]) + body
    digest = hmac.new(key, content, hashlib.sha256) if key else hashlib.sha256(content)
    return f"content-{digest.hexdigest()[:40]}"


def _canonical(value: Any) -> bytes:
    """Return *value* as bytes: RabbitMQ sorts tables when it delivers a message again."""
    match value:
        case dict():
            items = sorted((_canonical(str(name)), _canonical(one)) for name, one in value.items())
            return b"{%s}" % b"".join(name + one for name, one in items)
        case list() | tuple():
            return b"[%s]" % b"".join(map(_canonical, value))
        case bytes():
            return b"%d:%s" % (len(value), value)
        case str():
            return _canonical(value.encode("utf-8", "surrogateescape"))
        case None:
            return b"~"
        case bool():
            return b"?%d" % value
        case int():  # also pika's own, which prints an L
            return b"#%d;" % value
        case _:
            return b"=" + _canonical(repr(value))


_log = logging.getLogger("holdfast.brokers.rabbitmq")
_ID, _KEY, _KEY64 = PREFIX + "id", PREFIX + "partitionkey", PREFIX + "partitionkeybase64"
_USUAL = HEADERS | MESSAGE_ID
_UNUSUAL = 0xFFFF & ~(_USUAL | CONTENT_TYPE | DELIVERY_MODE | TIMESTAMP)
_TEXT = ord("S")
_MILLISECONDS = 100_000_000_000  # seconds of the year 5138: foreign stamps beyond are finer
_MOST_NAMES = 10_000
_u32 = struct.Struct(">I").unpack_from
_u64 = struct.Struct(">Q").unpack_from
_names: dict[bytes, str] = {}


class Content(NamedTuple):
    """What a message says beside its body."""

    id: str | None
    key: bytes | None
    pairs: list[Pair]
    stamp: float | None
    nth: int = 1
    """Which delivery of the message this is, from 1."""
    is_null: bool = False


def full(properties: Any) -> Any:
    """Return all properties as pika has them, decoded or not."""
    return properties.full if isinstance(properties, Incoming) else properties


class Incoming:
    """The properties of a message that has come, undecoded: whoever handles it decodes them.

    pika would decode them in the connection's thread, and far more slowly.
    """

    __slots__ = ("_full", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._full: Any = None

    @property
    def full(self) -> Any:
        """All properties, as pika has them."""
        if self._full is None:
            properties = driver("pika", extra="rabbitmq").BasicProperties()
            try:
                properties.decode(self._raw)
            except Exception as error:  # noqa: BLE001 - a poison message must be a message, too
                _log.warning("a message has properties that cannot be decoded: %r", error)
            self._full = properties
        return self._full

    def content(self) -> Content:
        """Return what the message says."""
        return _quick(self._raw) or content_of(self.full)


def _quick(raw: bytes) -> Content | None:
    """Return what a message says that was published here and comes for the first time.

    None for one that has anything unusual.
    """
    flags = raw[0] << 8 | raw[1]
    if flags & _UNUSUAL or flags & _USUAL != _USUAL:
        return None
    pairs: list[Pair] = []
    at, key, is_ours = 2, None, False
    if flags & CONTENT_TYPE:
        at = 3 + raw[2]
        pairs.append(("content-type", raw[3:at]))
    (size,) = _u32(raw, at)
    at, end = at + 4, at + 4 + size
    known = _names.get
    while at < end:
        start = at + 1 + raw[at]
        encoded = raw[at + 1 : start]
        name = known(encoded) or _learn(encoded)
        if raw[start] != _TEXT or not name:
            return None
        (size,) = _u32(raw, start + 1)
        at = start + 5 + size
        value = raw[start + 5 : at]
        pairs.append((name, value))
        if name == _KEY:
            key = value
        elif name == _ID:
            is_ours = True
        elif name == _KEY64:
            return None
    if not is_ours:
        return None
    if flags & DELIVERY_MODE:
        at += 1
    end = at + 1 + raw[at]
    stamp = float(_u64(raw, end)[0]) if flags & TIMESTAMP else None
    return Content(raw[at + 1 : end].decode("utf-8", "replace"), key, pairs, stamp)


def _learn(encoded: bytes) -> str | None:
    """Return a header's name, and remember it; None if it needs a second look."""
    name = encoded.decode("utf-8", "replace")
    if name in HIDDEN or name.startswith((OWN, *DEATH)):
        return None
    if len(_names) < _MOST_NAMES:
        _names[encoded] = name
    return name


def content_of(properties: Any) -> Content:
    """Return what any message says, whoever published it."""
    headers = properties.headers or {}
    return Content(
        id=properties.message_id or None,
        key=_key(headers),
        pairs=_pairs(properties, headers),
        stamp=_stamp(properties.timestamp),
        nth=1 + _number(headers.get(COUNT)) + _number(headers.get(DELIVERIES)),
        is_null=NULL in headers,
    )


def _key(headers: dict[Any, Any]) -> bytes | None:
    if (text := headers.get(_KEY)) is not None:
        return _bytes(text)
    if (coded := headers.get(_KEY64)) is None:
        return None
    try:
        return b64decode(_bytes(coded) or b"", validate=True)
    except ValueError:
        return None  # a foreign header that only looks like ours


def _stamp(stamp: int | None) -> float | None:
    if stamp is None:
        return None
    return float(stamp) if stamp < _MILLISECONDS else stamp / 1000


def _pairs(properties: Any, headers: dict[Any, Any]) -> list[Pair]:
    """Return the headers as they were given, and those that follow from foreign properties."""
    pairs: list[Pair] = []
    if (kind := properties.content_type) is not None:
        pairs.append(("content-type", _bytes(kind)))
    for given, value in headers.items():
        name = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        if name in HIDDEN or name.startswith(DEATH):
            continue
        if isinstance(value, list):
            pairs += [(name, _bytes(one)) for one in value]
        else:
            pairs.append((name, _bytes(value)))
    if ORDER in headers:
        pairs = _ordered(pairs, _bytes(headers[ORDER]) or b"")
    if _ID not in headers:
        pairs += _foreign(properties, is_named=NAMELESS not in headers)
    return pairs


def _ordered(pairs: list[Pair], order: bytes) -> list[Pair]:
    """Return the own headers after the attributes, in the *order* in which they were given."""
    values: dict[str, list[HeaderValue]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    # From the end: where an attribute and a header share a name, the attribute comes first.
    backwards = reversed(order.decode("utf-8", "replace").split(" "))
    own = [(name, values[name].pop()) for name in backwards if values.get(name)]
    rest = [(name, value) for name, some in values.items() for value in some]
    return rest + [(name.removeprefix(OWN), value) for name, value in reversed(own)]


def _foreign(properties: Any, *, is_named: bool) -> list[Pair]:
    """Return what a publisher that does not know of CloudEvents says in properties."""
    pairs: list[Pair] = []
    for name, value in (
        ("id", properties.message_id if is_named else None),
        ("correlationid", properties.correlation_id),
        ("type", properties.type),
    ):
        if value:
            pairs.append((PREFIX + name, _bytes(value)))
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
    properties = full(properties)
    headers = {
        name: value
        for name, value in (properties.headers or {}).items()
        if name not in BROKERS_OWN and not name.startswith(DEATH)
    }
    later = copy(properties)
    later.headers = {**headers, DELIVERIES: count}
    if not properties.message_id:
        later.headers[NAMELESS] = True
    later.message_id = position
    later.delivery_mode = 2
    later.expiration = later.user_id = None
    return later
