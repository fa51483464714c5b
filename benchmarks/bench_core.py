"""Message encode and decode against plain msgspec."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from figures import Figure, Goal, compare, nanoseconds
from holdfast import Message
from holdfast.cloudevents import from_wire, to_wire
from holdfast.codec import JsonCodec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Order(msgspec.Struct):
    order_id: int
    customer: str
    cents: int
    lines: list[str]


ORDER = Order(17, "customer-9", 129_900, [f"article {n}" for n in range(18)])


def figures() -> Iterator[Figure]:
    """Measure the codec, and the whole envelope around it."""
    codec = JsonCodec()
    payload, content_type = codec.encode(ORDER)
    decode = codec.decoder_for(Order)
    raw_encode, raw_decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Order).decode
    message = Message.new("orders", payload, key="customer-9", content_type=content_type)
    wire = to_wire(message)
    now = datetime.now(UTC)

    def envelope() -> None:
        from_wire(
            topic="orders",
            key=b"customer-9",
            body=payload,
            headers=wire,
            fallback_id=lambda: "",
            fallback_time=lambda: now,
        )

    yield compare(
        "encode a typed payload",
        ours=lambda: nanoseconds(lambda: codec.encode(ORDER)),
        peer=lambda: nanoseconds(lambda: raw_encode(ORDER)),
        unit="ns",
        goal=Goal(),
        detail="JsonCodec.encode against msgspec.json.Encoder, 300 bytes",
    )
    yield compare(
        "decode a typed payload",
        ours=lambda: nanoseconds(lambda: decode(payload)),
        peer=lambda: nanoseconds(lambda: raw_decode(payload or b"")),
        unit="ns",
        goal=Goal(),
        detail="compiled decoder against msgspec.json.Decoder, 300 bytes",
    )
    yield compare(
        "write the CloudEvents headers",
        ours=lambda: nanoseconds(lambda: to_wire(message)),
        peer=lambda: nanoseconds(lambda: raw_encode(ORDER)),
        unit="ns",
        goal=Goal(),
        detail="to_wire with 9 attributes; the peer is msgspec encoding the payload",
    )
    yield compare(
        "read the CloudEvents headers",
        ours=lambda: nanoseconds(envelope),
        peer=lambda: nanoseconds(lambda: raw_decode(payload or b"")),
        unit="ns",
        goal=Goal(),
        detail="from_wire with 9 attributes; the peer is msgspec decoding the payload",
    )
