"""A message as bytes in a row of our own, and back, with nothing lost."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - msgspec reads the annotations

import msgspec

from holdfast.headers import Headers
from holdfast.message import Message


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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def packed(message: Message) -> bytes:
    """Return *message* as bytes."""
    return _encode(
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


def unpacked(content: bytes) -> Message:
    """Return the message that `packed` made *content* of."""
    kept = _decode(content)
    fields = {name: getattr(kept, name) for name in _Kept.__struct_fields__}
    return Message(**{**fields, "headers": Headers(kept.headers)})
