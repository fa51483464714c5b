"""CloudEvents 1.0: what a message looks like on the wire, in binary and structured mode.

In binary mode each attribute is a header and the payload travels untouched. `to_wire` puts
the attributes ahead of the message's own headers, and `from_wire` lifts the first sound
value of each, so a header that repeats an attribute survives the journey as a header.

Extensions: `correlationid`, `causationid`, `traceparent`, `partitionkey` and, for a key that
is empty or not text, `partitionkeybase64`; by them brokers without keys carry one.

Messages that Debezium's outbox event router published from Holdfast's table.

The router turns columns into headers: `id` holds the event's id and, with
`table.fields.additional.placement=headers:header:holdfast`, the header `holdfast` holds the
column `headers`: all headers that Holdfast's own relay would have sent, as a JSON array of
`[name, value]`; a value is text, null, or `{"base64": …}` where it is not UTF-8.

CloudEvents in structured mode: the whole event as one JSON object, and back to headers.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from holdfast.codec import JSON, failure, is_json
from holdfast.errors import ConfigurationError, DecodeFailed, InvalidMessage
from holdfast.headers import EMPTY, Headers
from holdfast.message import Message
from holdfast.stored_message import StoredMessage, StoredMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.headers import Pair
    from holdfast.stored_message import Record


HEADER: Final = "holdfast"
"""Where the router is told to put the column `headers`."""

_ID = "id"
_CONTEXT = "__debezium."  # which connector and task it was, in versions from 3 on
_UUID_LENGTH = 36
_decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode


def unrouted(headers: Iterable[Pair]) -> list[Pair] | None:
    """Return the headers as Holdfast's relay would have sent them; None for other messages.

    Of an outbox table that is not Holdfast's the id at least is known.
    """
    given = list(headers)
    packed = next((value for name, value in given if name == HEADER and value), None)
    routed = next((value for name, value in given if name == _ID and value), None)
    if packed is not None:
        try:
            wire = [(name, _bytes(value)) for name, value in _decode(packed)]
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
            return None
        known = {value for name, value in wire if name == "ce_id"}
        own = {HEADER, _ID} if routed in known else {HEADER}
        rest = (pair for pair in given if pair[0] not in own)
        return [*wire, *(pair for pair in rest if not pair[0].startswith(_CONTEXT))]
    if routed is not None and _is_uuid(routed):
        return [("ce_id", routed), *(pair for pair in given if pair[0] != _ID)]
    return None


def _bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    try:
        return base64.b64decode(value["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _is_uuid(value: bytes) -> bool:
    try:
        return len(value) == _UUID_LENGTH and bool(uuid.UUID(value.decode()))
    except ValueError:
        return False


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


PREFIXES: Final = ("ce_", "ce-", "cloudEvents:", "cloudEvents_")
"""How the bindings mark attributes: Kafka, HTTP and NATS, AMQP, AMQP where colons are refused."""

_SPECVERSION, _ID_CLOUDEVENTS, _TIME, _KEY, _KEY64, _CONTENT_TYPE = 0, 1, 4, 9, 10, 11
_VERSION = b"1.0"
_VERSIONS = (None, "1.0")

_NAMES = {prefix: tuple(prefix + name for name in ATTRIBUTES) for prefix in PREFIXES}
_SLOTS = {name: slot for names in _NAMES.values() for slot, name in enumerate(names)}
_SLOTS |= {"content-type": _CONTENT_TYPE, "Content-Type": _CONTENT_TYPE}
# HTTP and NATS percent-encode values, so their slots are told apart by a negative number;
# HTTP libraries also capitalise names.
_SLOTS |= {name: ~slot for slot, name in enumerate(_NAMES["ce-"])}
_SLOTS |= {name.title(): ~slot for slot, name in enumerate(_NAMES["ce-"])}

_PLAIN = bytes(code for code in range(0x21, 0x7F) if code not in b'"%')
_json = msgspec.json.Encoder().encode


def to_wire(message: Message, *, prefix: str = "ce_") -> tuple[Pair, ...]:
    """Return all headers that *message* travels with in binary mode."""
    if isinstance(message, StoredMessage) and prefix == "ce_":
        return message.wire
    return tuple(wire_list(message, prefix))


def wire_list(message: Message, prefix: str = "ce_") -> list[Pair]:
    """Return what `to_wire` returns, for clients that take nothing but a list."""
    if isinstance(message, StoredMessage):
        return list(message.wire) if prefix == "ce_" else wire_list(_unstaged(message), prefix)
    if (names := _NAMES.get(prefix)) is None:
        raise ConfigurationError(f"prefix {prefix!r}: use one of {', '.join(PREFIXES)}")
    version, id_, type_, source, time, schema, correlation, causation, trace, key, key64 = names
    try:
        pairs: list[Pair] = [
            (version, _VERSION),
            (id_, message.id.encode()),
            (type_, message.type.encode()),
            (source, message.source.encode()),
            (time, rfc3339(message.time)),
        ]
        if (text := message.schema) is not None:
            pairs.append((schema, text.encode()))
        if (text := message.correlation_id) is not None:
            pairs.append((correlation, text.encode()))
        if (text := message.causation_id) is not None:
            pairs.append((causation, text.encode()))
        if (text := message.traceparent) is not None:
            pairs.append((trace, text.encode()))
        if (own := message.key) is not None:
            pairs.append((key, own) if own and is_text(own) else (key64, b64encode(own)))
        if prefix == "ce-" and b"".join([v or b"" for _, v in pairs]).translate(None, _PLAIN):
            pairs = [(n, quote_from_bytes(v or b"", _PLAIN).encode()) for n, v in pairs]
        if (text := message.content_type) is not None:
            pairs.append(("content-type", text.encode()))
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"{error.object!r} cannot be written as UTF-8: remove the lone surrogate"
        ) from error
    if own_headers := message.headers.pairs:
        pairs += own_headers
    return pairs


def text_list(message: Message) -> Sequence[tuple[str, str | bytes | None]]:
    """Return what `wire_list` returns, with text for bytes where that is at hand."""
    texts = message.texts if isinstance(message, StoredMessage) else None
    return wire_list(message) if texts is None else texts


def ascii_list(message: Message) -> list[tuple[str, str]] | None:
    """Return what `wire_list` returns as text; None where that is not plain ASCII throughout.

    For those who keep text: it spares making bytes of it and text of those again.
    """
    pairs = [
        _VERSION_TEXT,
        ("ce_id", message.id),
        ("ce_type", message.type),
        ("ce_source", message.source),
        ("ce_time", rfc3339(message.time).decode()),
    ]
    if (text := message.schema) is not None:
        pairs.append(("ce_dataschema", text))
    if (text := message.correlation_id) is not None:
        pairs.append(("ce_correlationid", text))
    if (text := message.causation_id) is not None:
        pairs.append(("ce_causationid", text))
    if (text := message.traceparent) is not None:
        pairs.append(("ce_traceparent", text))
    if (key := message.key) is not None:
        if not key or not key.isascii():
            return None
        pairs.append(("ce_partitionkey", key.decode()))
    if (text := message.content_type) is not None:
        pairs.append(("content-type", text))
    for name, value in message.headers.pairs:
        if value is None or not value.isascii():
            return None
        pairs.append((name, value.decode()))
    return pairs if "".join([text for _, text in pairs]).isascii() else None


_VERSION_TEXT = ("ce_specversion", _VERSION.decode())


def records_of(messages: Sequence[Message]) -> Iterator[Record | InvalidMessage]:
    """Return what a client library sends of each message, or why it cannot be written."""
    return messages.records() if isinstance(messages, StoredMessages) else _records(messages)


def _records(messages: Sequence[Message]) -> Iterator[Record | InvalidMessage]:
    for message in messages:
        try:
            yield message.topic, message.payload, message.key, text_list(message)
        except InvalidMessage as error:
            yield error


def unstaged(message: Message) -> Message:
    """Return *message* with headers of its own; one that is not staged has them."""
    return _unstaged(message) if isinstance(message, StoredMessage) else message


def _unstaged(staged: StoredMessage) -> Message:
    return from_wire(
        topic=staged.topic,
        key=staged.key,
        body=staged.payload,
        headers=staged.wire,
        fallback_id=lambda: staged.id,
        fallback_time=lambda: staged.time,
    )


def from_wire(
    *,
    topic: str,
    key: bytes | None,
    body: bytes | None,
    headers: Sequence[Pair],
    fallback_id: Callable[[], str],
    fallback_time: Callable[[], datetime],
) -> Message:
    """Return the message that arrived, of whatever origin; no content makes this raise.

    What lacks an attribute gets the fallback. A malformed attribute counts as lacking and
    stays among the headers, as do unknown attributes and all other headers. A malformed
    structured event is left as it is, for the handler's decoder to refuse.
    """
    message = _read(topic, key, body, headers, fallback_id, fallback_time)
    kind = message.content_type
    if kind is None or kind == "application/json" or not kind.lower().startswith(CONTENT_TYPE):
        return message
    try:
        return from_structured(
            body or b"",
            topic=topic,
            key=key,
            headers=headers,
            fallback_id=fallback_id,
            fallback_time=fallback_time,
        )
    except DecodeFailed:  # a dead letter must be a message, too
        return message


def to_structured(message: Message) -> bytes:
    """Return *message* as one JSON event; headers that are no attributes travel beside it."""
    return pack(to_wire(message), message.content_type, message.payload)


def from_structured(
    body: bytes,
    *,
    topic: str,
    key: bytes | None = None,
    headers: Iterable[Pair] = (),
    fallback_id: Callable[[], str],
    fallback_time: Callable[[], datetime],
) -> Message:
    """Return the message in the JSON event *body*; its unknown extensions become headers.

    Missing attributes get the fallbacks. Raises `DecodeFailed` for what is no JSON event.
    """
    attributes, payload = unpack(body, headers)
    return _read(topic, key, payload, attributes, fallback_id, fallback_time)


def rfc3339(moment: datetime) -> bytes:
    """Return *moment* in UTC to the microsecond: 27 bytes that sort by time."""
    if moment.tzinfo is not UTC:
        try:
            moment = moment.astimezone(UTC)
        except OverflowError as error:
            raise InvalidMessage(f"time {moment.isoformat()} leaves years 1 to 9999") from error
    text = _json(moment)  # ten times as fast as isoformat
    return text[1:-1] if len(text) == 29 else text[1:20] + b".000000Z"


def _read(
    topic: str,
    key: bytes | None,
    body: bytes | None,
    headers: Iterable[Pair],
    fallback_id: Callable[[], str],
    fallback_time: Callable[[], datetime],
) -> Message:
    try:  # as if every value were sound; most often it is
        values, rest = _lifted(headers)
        moment, own = _derived(values, key)
    except ValueError:
        values, rest = _lifted(headers, lambda slot, value: _is_sound(slot, value, key))
        moment, own = _derived(values, key)
    _, id_, type_, source, _, schema, correlation, causation, trace, _, _, kind = values
    if id_ is None and rest and (routed := unrouted(headers)) is not None:
        return _read(topic, key, body, routed, fallback_id, fallback_time)
    if trace is None and rest:
        trace = _plain_trace(rest)
    return Message(
        id=fallback_id() if id_ is None else id_,
        topic=topic,
        payload=body,
        type="message" if type_ is None else type_,
        source=f"topic:{topic}" if source is None else source,
        key=own,
        headers=Headers.received(rest) if rest else EMPTY,
        time=fallback_time() if moment is None else moment,
        correlation_id=correlation,
        causation_id=causation,
        content_type=kind,
        schema=schema,
        traceparent=trace,
    )


def _lifted(
    headers: Iterable[Pair], is_sound: Callable[[int, bytes], bool] | None = None
) -> tuple[list[str | None], list[Pair]]:
    """Return the known attributes by slot, and the headers that remain."""
    values: list[str | None] = [None] * 12
    rest: list[Pair] = []
    slot_of = _SLOTS.get
    for pair in headers:
        name, value = pair
        slot = slot_of(name)
        if slot is None or value is None:
            rest.append(pair)
            continue
        if slot < 0:
            slot, value = ~slot, unquote_to_bytes(value) if 0x25 in value else value
        if values[slot] is not None or (is_sound is not None and not is_sound(slot, value)):
            rest.append(pair)
            continue
        values[slot] = value.decode()
    return values, rest


def _plain_trace(rest: list[Pair]) -> str | None:
    """Return the W3C header, which stays where the tracing library looks for it."""
    for name, value in rest:
        if value is not None and name.lower() == "traceparent" and is_text(value):
            return value.decode()
    return None


def _derived(values: list[str | None], key: bytes | None) -> tuple[datetime | None, bytes | None]:
    """Return time and key; ValueError when an attribute is malformed or contradicts *key*."""
    if values[_SPECVERSION] not in _VERSIONS or values[_ID_CLOUDEVENTS] == "" or values[_KEY] == "":
        raise ValueError("not an event of version 1.0 with an id")
    moment = None if (text := values[_TIME]) is None else _moment(text)
    own = key
    if (text := values[_KEY]) is not None:
        own = _agreed(text.encode(), key)
    if (text := values[_KEY64]) is not None:
        coded = _agreed(b64decode(text, validate=True), key)
        own = coded if own is None else own
    return moment, own


def _agreed(own: bytes, key: bytes | None) -> bytes:
    if key is not None and own != key:
        raise ValueError("the broker has another key")
    return own


def _is_sound(slot: int, value: bytes, key: bytes | None) -> bool:
    alone: list[str | None] = [None] * 12
    try:
        alone[slot] = value.decode()
        _derived(alone, key)
    except ValueError:
        return False
    return True


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is UTC:
        return moment
    if moment.tzinfo is None:
        raise ValueError("no offset from UTC")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("outside years 1 to 9999") from error
