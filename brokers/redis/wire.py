"""What a message looks like in a stream.

An entry has up to three fields, each left out when it is None:

    key      the key, as it is
    body     the payload, as it is
    headers  a MessagePack array of [name, value] pairs, the value binary or nil, in order

Others may add entries with XADD. A field of any other name is read as a header. Without
`body` and `headers` an entry is somebody's own record: one field alone is the payload,
several become a JSON object, which is how a flat record is most likely to be understood,
and are headers besides, byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cloudevents import to_wire
from holdfast.errors import MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.headers import Pair
    from holdfast.message import Message

Content = tuple[bytes | None, bytes | None, "Sequence[Pair]"]
"""Key, body, headers."""

_pack = msgspec.msgpack.Encoder().encode
_pairs = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode
_loose_pairs = msgspec.msgpack.Decoder(list[tuple[str, Any]]).decode
_json = msgspec.json.Encoder().encode

_NAMES = [b"\xa7headers", b"\xa4body", b"\xa3key"]  # as cmsgpack packs them
_HEADERS, _BODY, _KEY = _NAMES
_USUAL = 2 * len(_NAMES)
_LONG = {0xD9: 2, 0xDA: 3, 0xDB: 5}


def encoded(message: Message, limit: int) -> list[bytes]:
    """Return the fields and values of *message*; `MessageTooLarge` beyond *limit* bytes."""
    headers = _pack(to_wire(message))
    fields = [b"headers", headers]
    size = len(headers)
    if (body := message.payload) is not None:
        fields += (b"body", body)
        size += len(body)
    if (key := message.key) is not None:
        fields += (b"key", key)
        size += len(key)
    if size > limit:
        raise MessageTooLarge(size, limit)
    return fields


def unpacked(raw: msgspec.Raw) -> bytes | None:
    """Return the string that cmsgpack packed, which need not be text; None for false."""
    data = bytes(raw)
    first = data[0]
    if 0xA0 <= first <= 0xBF:  # a short string, its length in the first byte
        return data[1:]
    return data[_LONG[first] :] if first in _LONG else None


def decoded(fields: Sequence[msgspec.Raw]) -> Content:
    """Return the content of an entry; no content makes this raise."""
    if len(fields) == _USUAL and [bytes(name) for name in fields[::2]] == _NAMES:
        try:  # as `encoded` writes a message with key and body
            return unpacked(fields[5]), unpacked(fields[3]), _pairs(unpacked(fields[1]) or b"")
        except ValueError:
            pass
    return _decoded(fields)


def _decoded(fields: Sequence[msgspec.Raw]) -> Content:
    key = body = packed = None
    others: list[msgspec.Raw] = []
    names = iter(fields)
    for field, value in zip(names, names, strict=True):
        name = bytes(field)
        if name == _HEADERS:
            packed = unpacked(value)
        elif name == _BODY:
            body = unpacked(value)
        elif name == _KEY:
            key = unpacked(value)
        else:
            others += (field, value)
    if packed is not None and not others:
        try:
            return key, body, _pairs(packed)
        except ValueError:
            pass
    return _foreign(key, body, packed, others)


def _foreign(
    key: bytes | None, body: bytes | None, packed: bytes | None, others: list[msgspec.Raw]
) -> Content:
    """Return the content of an entry that was not written here."""
    texts = [unpacked(raw) or b"" for raw in others]
    plain = list(zip(texts[::2], texts[1::2], strict=True))
    headers: list[Pair] = [(name.decode("utf-8", "replace"), value) for name, value in plain]
    if packed is not None:
        return key, body, [*_read_pairs(packed), *headers]
    if body is not None or not plain:
        return key, body, headers
    if len(plain) == 1:
        return key, plain[0][1], ()
    record = {name: (value or b"").decode("utf-8", "replace") for name, value in headers}
    return key, _json(record), [("content-type", b"application/json"), *headers]


def _read_pairs(packed: bytes) -> list[Pair]:
    try:
        return [(name, _value(value)) for name, value in _loose_pairs(packed)]
    except ValueError:
        return [("headers", packed)]


def _value(value: Any) -> bytes | None:
    """Return the value of a header that others wrote, maybe as text or a number."""
    return value if value is None or isinstance(value, bytes) else str(value).encode()
