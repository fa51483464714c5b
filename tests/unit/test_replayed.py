"""A message of a plan goes out with the same headers, whichever way a client takes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.brokers.nats.jetstream import headers_of as nats_headers
from holdfast.cloudevents import text_list, to_wire, unstaged
from holdfast.dlq.replay.outgoing import ReplayRows
from holdfast.headers import Headers, ReplayHeaders, ReplayStamp
from holdfast.message import Message
from holdfast.stored_message import header_text

STAMP = ReplayStamp(group="billing", plan="p-1", topic="orders")
MARKS = ReplayHeaders(group="billing", plan="p-1", dlq_id="d-1", topic="orders", count=2)
AT = datetime(2026, 11, 17, 3, 0, 0, 123456, UTC)
EVERYTHING: dict[str, Any] = {
    "correlation_id": "c", "causation_id": "w", "content_type": "application/json",
    "schema": "urn:order", "traceparent": "00-aa-bb-01",
}  # fmt: skip


def both(**fields: Any) -> tuple[Message, Any]:
    """Return a message with its marks, and the same as a plan sends it."""
    own = fields.pop("headers", Headers())
    chosen = {"key": b"k", "payload": b"{}", "source": "/shop", **fields}
    plain = Message(id="m-1", topic="orders.billing.replay", type="Placed", time=AT,
                    headers=MARKS.stamped(own), **chosen)  # fmt: skip
    return plain, sent_as(plain, own)[0]


def sent_as(plain: Message, own: Headers, seconds: float = AT.timestamp()) -> ReplayRows:
    """Return *plain* as a plan sends it, its *own* headers being those without marks."""
    row = (
        1, "d-1", "orders", "billing", plain.id, plain.type, plain.key, None, plain.payload,
        header_text(own), seconds, plain.source, plain.schema, plain.correlation_id,
        plain.causation_id, plain.traceparent, plain.content_type, 1,
    )  # fmt: skip
    return ReplayRows([row], {("orders", "billing"): (plain.topic, STAMP)})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        EVERYTHING,
        {"key": None, "payload": None},
        {"key": b""},
        {"key": b"\xff\x00"},
        {"key": b"with \x00 zero"},
        {"headers": Headers([("plain", "text"), ("plain", "again")])},
        {"headers": Headers([("x", b"\xff"), ("none", None), ("zero", "a\x00b")])},
        {"headers": Headers([("x-replay-group", "old"), ("x-replay-count", "1"), ("y", "z")])},
    ],
)
def test_every_form_of_the_headers_says_the_same(fields: dict[str, Any]) -> None:
    """Bytes, text for clients that encode it themselves, and the form of NATS."""
    plain, sent = both(**fields)
    assert list(to_wire(sent)) == list(to_wire(plain))
    as_bytes = [
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in text_list(sent)
    ]
    assert as_bytes == list(to_wire(plain))
    [(topic, payload, key, pairs)] = sent_as(plain, fields.get("headers", Headers())).records()
    assert (topic, payload, key, list(pairs)) == (
        plain.topic, plain.payload, plain.key, list(text_list(sent)),
    )  # fmt: skip
    assert unstaged(sent).headers == plain.headers
    assert nats_headers(sent) == nats_headers(plain)
    assert sent.is_replay
    assert (sent.id, sent.topic, sent.key, sent.payload) == (
        plain.id, plain.topic, plain.key, plain.payload,
    )  # fmt: skip


@pytest.mark.parametrize(
    "seconds",
    [
        0.0,
        -0.25,
        1_700_000_000.0,
        1_700_000_000.9999996,  # rounds up into the next second
        1_700_000_000.0000005,
        1_700_000_000.123456789,
        253_402_300_799.0,
        253_402_300_799.999999,  # as a number it is the year 10000
    ],
)
def test_the_time_of_a_message_is_the_same_in_text_and_in_bytes(seconds: float) -> None:
    """Text is made another way, which is faster."""
    _, sent = both()
    [later] = sent_as(sent.whole, Headers(), seconds)
    assert dict(text_list(later))["ce_time"] == dict(to_wire(later.whole))["ce_time"].decode()
