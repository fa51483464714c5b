"""How large a message is in a batch of Kafka's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cloudevents import to_wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.message import Message

_RECORD, _HEADER, _BATCH = 24, 6, 64  # bytes of framing, rounded up


def wire_size(message: Message) -> int:
    """Return the bytes of payload, key and all headers."""
    headers = sum(len(name) + len(value or b"") for name, value in to_wire(message))
    return len(message.payload or b"") + len(message.key or b"") + headers


def batch_size(message: Message) -> int:
    """Return the bytes of a batch with *message* alone, at most."""
    return _BATCH + _record_size(message)


def _record_size(message: Message) -> int:
    return wire_size(message) + _RECORD + _HEADER * len(to_wire(message))


def chunks(messages: Sequence[Message], limit: int) -> Iterator[Sequence[Message]]:
    """Yield *messages* in runs that fit into one batch of *limit* bytes, in order.

    One that fits into none is a run of its own: the broker says so better.
    """
    start, size = 0, _BATCH
    for place, message in enumerate(messages):
        own = _record_size(message)
        if place > start and size + own > limit:
            yield messages[start:place]
            start, size = place, _BATCH
        size += own
    yield messages[start:]
