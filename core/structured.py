"""CloudEvents in structured mode: the whole event as one JSON object, and back to headers."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.codec import JSON, failure, is_json
from holdfast.errors import DecodeFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.headers import Pair

CONTENT_TYPE: Final = "application/cloudevents+json"
"""The content type that announces structured mode."""

ATTRIBUTES: Final = (
    "specversion", "id", "type", "source", "time", "dataschema", "correlationid",
    "causationid", "traceparent", "partitionkey", "partitionkeybase64",
)  # fmt: skip
"""What a message has a field for."""

_ATTRIBUTE = re.compile(r"(?:ce_|ce-|cloudEvents:|cloudEvents_)([a-z0-9]+)")
_BODY = ("data", "data_base64", "datacontenttype")  # members that are no attributes

_ANNOUNCED = CONTENT_TYPE.encode()

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def pack(headers: Iterable[Pair], content_type: str | None, payload: bytes | None) -> bytes:
    """Return one JSON event; of *headers* those that are attributes, the first of each."""
    event: dict[str, object] = {}
    for name, value in headers:
        attribute = _ATTRIBUTE.fullmatch(name)
        if attribute and attribute[1] not in _BODY and value is not None and is_text(value):
            event.setdefault(attribute[1], value.decode())
    if content_type is not None:
        event["datacontenttype"] = content_type
    if payload is not None:
        if is_json(content_type) and _is_verbatim(payload):
            event["data"] = msgspec.Raw(payload)
        else:
            event["data_base64"] = payload
    return msgspec.json.encode(event)


def unpack(body: bytes, headers: Iterable[Pair]) -> tuple[Sequence[Pair], bytes | None]:
    """Return headers and payload of the event *body* as binary mode would have them.

    The attributes come first, as `ce_` headers, then *headers*. An extension unknown to
    Holdfast that *headers* repeat is left to them. Raises `DecodeFailed` for what is no event.
    """
    try:
        body.decode()
        event = _members(body)
    except (ValueError, RecursionError) as error:
        raise failure(error, body) from error
    given = [pair for pair in headers if not _announces(pair)]
    repeated = {(m[1], value) for name, value in given if (m := _ATTRIBUTE.fullmatch(name))}
    attributes: list[Pair] = []
    for name in event:
        value = None if name in _BODY else _text(event, name)
        if value is not None and (name in ATTRIBUTES or (name, value) not in repeated):
            attributes.append((f"ce_{name}", value))
    kind = _text(event, "datacontenttype")
    if kind is None and "data" in event:
        kind = JSON.encode()
    if kind is not None:
        attributes.append(("content-type", kind))
    return (*attributes, *given), _data(event, kind)


def is_text(value: bytes) -> bool:
    """Whether *value* is UTF-8."""
    if value.isascii():
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(event: dict[str, msgspec.Raw], name: str) -> bytes | None:
    """Return member *name* in its canonical text, as binary mode has it."""
    try:
        value = msgspec.json.decode(event.get(name, b"null"))
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(failure(error).reason, f"$.{name}") from error
    match value:
        case None:
            return None
        case str():
            return value.encode()
        case bool() | int():
            return str(value).lower().encode()
    raise DecodeFailed(
        f"attribute {name!r} is a {type(value).__name__}: use a string, boolean or integer",
        f"$.{name}",
    )


def _data(event: dict[str, msgspec.Raw], kind: bytes | None) -> bytes | None:
    if (coded := _text(event, "data_base64")) is not None:
        try:
            return b64decode(coded, validate=True)
        except ValueError as error:
            raise DecodeFailed(f"data is not base64: {error}", "$.data_base64") from error
    if "data" not in event:
        return None
    raw = bytes(event["data"])
    if raw.startswith(b'"') and kind is not None and not is_json(kind.decode()):
        return _text(event, "data")  # text of another kind travels as a JSON string
    return raw


def _announces(pair: Pair) -> bool:
    name, value = pair
    return name.lower() == "content-type" and (value or b"").lower().startswith(_ANNOUNCED)


def _is_verbatim(payload: bytes) -> bool:
    """Whether *payload* is JSON that comes out of an event byte for byte."""
    if not is_text(payload):
        return False
    try:
        return bytes(msgspec.json.decode(payload, type=msgspec.Raw)) == payload
    except (ValueError, RecursionError):
        return False
