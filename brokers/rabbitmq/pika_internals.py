"""What is done here in pika's place; all access to its inner parts is in this module.

Publishing through pika makes three objects and three system calls per message; reading, it
decodes every header whether anybody looks at it or not. Where a pika has not the methods that
this hooks into, everything goes through pika alone, only more slowly.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.brokers.rabbitmq.wire import Incoming, Properties
from holdfast.errors import BrokerDown
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.brokers.rabbitmq.confirms import Outgoing

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_PUBLISH = b"\x00\x3c\x00\x28\x00\x00"  # class 60, method 40, and a field of old
_MANDATORY = b"\x01"
_AT_ONCE = 64
_OVERHEAD = 8
_frame = struct.Struct(">BHI")
_content = struct.Struct(">BHIHHQ")
_lead = struct.Struct(">BHIHHQ")


@cache
def connection_class() -> Any:
    """Return pika's SelectConnection, with content headers left undecoded."""
    pika = driver("pika", extra="rabbitmq")
    frame = driver("pika.frame", extra="rabbitmq")
    base: Any = pika.SelectConnection
    if not hasattr(base, "_read_frame"):
        return base

    def read_frame(self: Any) -> tuple[int, Any]:
        data = self._frame_buffer
        if len(data) < _lead.size or data[0] != _HEADER:
            return base._read_frame(self)  # type: ignore[no-any-return]
        _, channel, size, _, _, length = _lead.unpack_from(data)
        end = _frame.size + size + 1
        if end > len(data):
            return 0, None
        if data[end - 1] != _END[0]:
            return base._read_frame(self)  # type: ignore[no-any-return]
        return end, frame.Header(channel, length, Incoming(data[_lead.size : end - 1]))

    return type("Connection", (base,), {"_read_frame": read_frame})


def close_without_cancelling(channel: Any) -> None:
    """Close *channel* so that its messages are back in their queue before anybody gets more.

    pika cancels the consumers first. A quorum queue then goes on with the next consumer while
    the messages of the cancelled one are still out: they would come after younger ones.
    """
    if hasattr(channel, "_cancelled") and hasattr(channel, "_consumers"):
        channel._cancelled.update(channel._consumers)
    channel.close()


def hang_up(connection: Any) -> None:
    """Drop *connection* at once, as pika does when no heartbeat comes; close() would wait."""
    if not connection.is_closed:
        connection._terminate_stream(BrokerDown("the server does not answer"))


class FrameWriter:
    """Sends many messages over one channel in few pieces."""

    def __init__(self, connection: Any, channel: Any) -> None:
        self._channel = channel
        self._number = channel.channel_number
        self._longest = connection.params.frame_max - _OVERHEAD
        self._emit = getattr(connection, "_adapter_emit_data", None)
        self._methods: dict[tuple[str, str], bytes] = {}

    def publish(self, parcels: Iterable[Outgoing]) -> None:
        """Send *parcels* in order, each of them mandatory."""
        pieces: list[bytes] = []
        for parcel in parcels:
            exchange, key, properties, body, _ = parcel
            if self._emit is None or not self._is_plain(properties, body):
                self._flush(pieces)
                self._channel.basic_publish(exchange, key, body, properties, mandatory=True)
                continue
            method = self._methods.get((exchange, key)) or self._method(exchange, key)
            encoded, length = properties.encoded, len(body)
            head = _content.pack(_HEADER, self._number, 12 + len(encoded), 60, 0, length)
            pieces += (method, head, encoded, _END)
            if length:
                pieces += (_frame.pack(_BODY, self._number, length), body, _END)
            if len(pieces) > 7 * _AT_ONCE:
                self._flush(pieces)
        self._flush(pieces)

    def _is_plain(self, properties: Any, body: bytes) -> bool:
        """Whether the message has one frame of each kind."""
        return type(properties) is Properties and len(body) <= self._longest

    def _flush(self, pieces: list[bytes]) -> None:
        if pieces and self._emit is not None:
            self._emit(b"".join(pieces))
            pieces.clear()

    def _method(self, exchange: str, key: str) -> bytes:
        names = b"".join(bytes((len(n),)) + n for n in (exchange.encode(), key.encode()))
        payload = _PUBLISH + names + _MANDATORY
        frame = _frame.pack(_METHOD, self._number, len(payload)) + payload + _END
        self._methods[exchange, key] = frame
        return frame
