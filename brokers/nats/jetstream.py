"""The JetStream API: requests and answers as the server spells them.

What a message looks like in NATS.

The payload is the message's payload, byte for byte. Headers:

- `ce-id`, `ce-type`, …: the CloudEvents attributes, in the binary mode of the NATS binding;
`ce-partitionkey` (or `ce-partitionkeybase64`) is the key;
- `Nats-Msg-Id`: source and id, by which the server stores a message once: the same id of another
source is another event. A replay has none, for it must pass although it was stored before;
- `content-type` and the message's own headers as they are, while all of them can be: each
name once, of token characters and not starting with `Nats-` or `Holdfast-`, each value
printable ASCII without spaces at its ends. Client libraries lose or change what is not, so if
any cannot, all travel in `Holdfast-Headers`: a JSON array of [name, value], values in base64
or null;
- `Holdfast-Body: null` for a message without payload, which is not an empty payload.

Messages of others need none of these.
"""

from __future__ import annotations

import re
from base64 import b64decode
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from holdfast.brokers.nats.errors import MESSAGE_NOT_FOUND, JetStreamRefusal, no_jetstream
from holdfast.cloudevents import to_wire, unstaged
from holdfast.errors import BrokerDown
from holdfast.headers import REPLAY_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nats.aio.client import Client

    from holdfast.brokers.nats.connection import Connection
    from holdfast.headers import Pair
    from holdfast.message import Message


Answer = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class JetStream:
    """Asks one server. A refusal raises `Refusal`, silence `BrokerDown`."""

    def __init__(self, connection: Connection, *, domain: str, timeout: float) -> None:
        self.connection = connection
        self.prefix = f"$JS.{domain}.API" if domain else "$JS.API"
        self.timeout = timeout

    def ask(self, operation: str, body: object = None) -> Answer:
        """Return the answer to an API request, e.g. `STREAM.INFO.orders`."""
        payload = b"" if body is None else _encode(body)
        answer = self._request(f"{self.prefix}.{operation}", payload, None)
        if "error" in answer:
            raise JetStreamRefusal(operation, answer["error"])
        return answer

    def check(self) -> None:
        """Raise `ConfigurationError` unless the server stores messages for us."""
        try:
            self.ask("INFO")
        except JetStreamRefusal as refusal:
            raise refusal.translated() from refusal

    def store(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Return the sequence under which *data* was stored on *subject*."""
        answer = self._request(subject, data, headers)
        if "error" in answer:
            raise JetStreamRefusal(f"publish to {subject}", answer["error"])
        return int(answer["seq"])

    def consumer(self, stream: str, name: str) -> Answer | None:
        """Return what the server knows of a consumer; None if there is none."""
        try:
            return self.ask(f"CONSUMER.INFO.{stream}.{name}")
        except JetStreamRefusal as refusal:
            if refusal.code == 404:  # the stream or the consumer
                return None
            raise refusal.translated() from refusal

    def message(self, stream: str, wanted: Mapping[str, Any]) -> Answer | None:
        """Return one stored message, by `seq`, `last_by_subj` or `next_by_subj`; None if none."""
        try:
            found: Answer = self.ask(f"STREAM.MSG.GET.{stream}", wanted)["message"]
        except JetStreamRefusal as refusal:
            if refusal.number == MESSAGE_NOT_FOUND:
                return None
            raise refusal.translated() from refusal
        return found

    def _request(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> Answer:
        async def request(client: Client) -> bytes:
            message = await client.request(subject, payload, timeout=self.timeout, headers=headers)
            data: bytes = message.data
            return data

        try:
            return _decode(self.connection.run(request))
        except BrokerDown as down:
            if type(down.__cause__).__name__ != "NoRespondersError":
                raise
            if not self.connection.has_jetstream:
                raise no_jetstream("nobody answers its API") from down
            raise BrokerDown(f"JetStream is not ready: nobody answers {subject}") from down


def moment(text: str) -> float:
    """Return the server's *text* for a time as POSIX seconds."""
    return datetime.fromisoformat(text).timestamp()


MSG_ID = "Nats-Msg-Id"
PACKED = "Holdfast-Headers"
BODY = "Holdfast-Body"

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_RESERVED = ("nats-", "holdfast-")
_PACKING = frozenset((PACKED, BODY))
_OURS = _PACKING | {MSG_ID}
_KEY, _KEY64 = "ce-partitionkey", "ce-partitionkeybase64"
_LINE = len("NATS/1.0\r\n") + len("\r\n")
_PER_HEADER = len(": \r\n")

_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(list[tuple[str, bytes | None]]).decode


def headers_of(message: Message) -> dict[str, str]:
    """Return the headers that *message* travels with."""
    message = unstaged(message)  # which headers are the message's own matters here
    pairs = to_wire(message, prefix="ce-")
    own = len(message.headers) + (message.content_type is not None)
    headers: dict[str, str] = {}
    attributes = pairs[: len(pairs) - own] if own else pairs
    for name, value in attributes:
        headers[name] = value.decode()  # type: ignore[union-attr]
    if own:
        _add(headers, pairs[len(pairs) - own :])
    if message.payload is None:
        headers[BODY] = "null"
    if REPLAY_GROUP not in message.headers:
        headers[MSG_ID] = _identity(message, headers)
    return headers


def _identity(message: Message, headers: Mapping[str, str]) -> str:
    """Return what the server knows the message by, of printable characters as headers are."""
    own = headers["ce-id"]
    return own if message.identity == message.id else f"{headers['ce-source']} {own}"


def size_of(headers: Mapping[str, str]) -> int:
    """Return the bytes that *headers* take on the wire."""
    size = _LINE + _PER_HEADER * len(headers)
    for name, value in headers.items():
        size += len(name) + (len(value) if value.isascii() else len(value.encode()))
    return size


def parts_of(
    headers: Mapping[str, str] | None, data: bytes
) -> tuple[bytes | None, bytes | None, list[Pair]]:
    """Return key, body and headers of what arrived, of whatever origin."""
    if not headers:
        return None, data, []
    ours = _OURS if "ce-id" in headers else _PACKING
    pairs: list[Pair] = [(n, value.encode()) for n, value in headers.items() if n not in ours]
    if PACKED in headers:
        pairs += _unpacked(headers[PACKED])
    body = None if not data and headers.get(BODY) == "null" else data
    return _key(headers), body, pairs


def _add(headers: dict[str, str], own: Sequence[Pair]) -> None:
    plain: dict[str, str] = {}
    for name, value in own:
        text = _plain(name, value)
        if text is None or name in plain or name in headers:
            headers[PACKED] = _pack(own).decode()
            return
        plain[name] = text
    headers.update(plain)


def _plain(name: str, value: bytes | None) -> str | None:
    """Return *value* as text if NATS carries it as it is under *name*."""
    if value is None or not _TOKEN.fullmatch(name) or name.lower().startswith(_RESERVED):
        return None
    if not value.isascii():
        return None
    text = value.decode()
    return text if text.isprintable() and text == text.strip() else None


def _unpacked(packed: str) -> list[Pair]:
    try:
        return _unpack(packed)
    except msgspec.DecodeError:  # of somebody else's making: a header like any other
        return [(PACKED, packed.encode())]


def _key(headers: Mapping[str, str]) -> bytes | None:
    text = headers.get(_KEY)
    if text is not None:
        return unquote_to_bytes(text) if "%" in text else text.encode()
    coded = headers.get(_KEY64)
    if coded is None:
        if "ce-id" in headers:
            return None
        lowered = {name.lower(): value for name, value in headers.items()}
        if _KEY not in lowered and _KEY64 not in lowered:
            return None
        return _key(lowered | {"ce-id": ""})
    try:
        return b64decode(coded, validate=True)
    except ValueError:
        return None
