"""CloudEvents: whatever a message is, it arrives as it was."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cloudevents import (
    PREFIXES,
    from_structured,
    from_wire,
    rfc3339,
    to_structured,
    to_wire,
)
from holdfast.errors import ConfigurationError, DecodeFailed, InvalidMessage
from holdfast.headers import Headers, Pair
from holdfast.message import Message

NOW = datetime(2026, 3, 1, 12, 30, 15, 250, tzinfo=UTC)
STRUCTURED = "application/cloudevents+json"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
some_texts = st.none() | texts
moments = st.datetimes(
    NOW.replace(year=2, tzinfo=None),
    NOW.replace(year=9998, tzinfo=None),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))]),
)
names = st.sampled_from(["tenant", "ce_tenant", "ce_id", "ce-time", "cloudEvents:type", "x-ü"])
pairs = st.lists(st.tuples(names, st.none() | st.binary(max_size=20)), max_size=6)
messages = st.builds(
    Message,
    id=texts.filter(bool),
    topic=texts.filter(bool),
    payload=st.none() | st.binary() | st.just(b'{"a": [1.50, null]}') | st.just(b' "x" '),
    type=texts,
    source=texts,
    key=st.none() | st.binary(max_size=20) | texts.map(str.encode),
    headers=pairs.map(Headers.received),
    time=moments,
    correlation_id=some_texts,
    causation_id=some_texts,
    content_type=st.sampled_from([None, "", "application/json", "text/plain", "a/b+json; v=1"]),
    schema=some_texts,
    traceparent=some_texts,
)


def message(**fields: object) -> Message:
    return Message(**{"id": "m-1", "topic": "orders", "payload": b"{}", "time": NOW} | fields)


def arrive(
    headers: tuple[Pair, ...] | list[Pair], *, key: bytes | None = None, body: bytes | None = b"{}"
) -> Message:
    return from_wire(
        topic="orders",
        key=key,
        body=body,
        headers=headers,
        fallback_id=lambda: "derived",
        fallback_time=lambda: NOW,
    )


def unwrap(body: bytes, **given_: object) -> Message:
    found: dict[str, object] = {"topic": "orders"} | given_
    return from_structured(body, fallback_id=lambda: "derived", fallback_time=lambda: NOW, **found)


@pytest.mark.parametrize("prefix", PREFIXES)
@given(sent=messages)
def test_a_message_arrives_as_it_was_sent(prefix: str, sent: Message) -> None:
    """Binary mode is lossless under the names of every binding."""
    received = from_wire(
        topic=sent.topic,
        key=sent.key,
        body=sent.payload,
        headers=to_wire(sent, prefix=prefix),
        fallback_id=lambda: "never",
        fallback_time=lambda: NOW,
    )
    assert received == sent


@pytest.mark.parametrize("prefix", PREFIXES)
@given(sent=messages)
def test_a_broker_without_keys_still_delivers_the_key(prefix: str, sent: Message) -> None:
    """The key comes back from the attributes, be it text, binary or empty."""
    received = arrive(to_wire(sent, prefix=prefix), key=None, body=sent.payload)
    assert received.key == sent.key


@given(sent=messages)
def test_a_structured_event_arrives_as_it_was_sent(sent: Message) -> None:
    """Structured mode is lossless when the message's own headers travel beside the event."""
    received = unwrap(to_structured(sent), topic=sent.topic, key=sent.key, headers=sent.headers)
    assert received == sent


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from([name for name, _ in to_wire(message(key=b"k", content_type="a/b"))])
            | st.sampled_from(
                ["Ce-Id", "ce-type", "Content-Type", "traceparent", "x", "ce_causationid"]
            ),
            st.none() | st.binary(max_size=12) | st.sampled_from([b"%", STRUCTURED.encode()]),
        )
    ),
    key=st.none() | st.binary(max_size=4),
    body=st.none() | st.binary(max_size=40) | st.just(b'{"id": 1, "data": {}}'),
)
def test_nothing_that_arrives_makes_reading_fail(
    headers: list[Pair], key: bytes | None, body: bytes | None
) -> None:
    """Arbitrary headers give a message, and sending that one on changes it no more."""
    first = arrive(headers, key=key, body=body)
    if (first.content_type or "").lower().startswith(STRUCTURED):
        assert first.payload == body
        return
    again = arrive(to_wire(first), key=first.key, body=first.payload)
    assert again == first


def test_the_wire_names_are_those_of_the_specification() -> None:
    """A reader of CloudEvents finds each attribute under the Kafka binding's name."""
    sent = message(
        key=b"o-7",
        type="order.placed",
        source="/shop",
        schema="order/v1",
        correlation_id="c",
        causation_id="p",
        traceparent="00-aa-bb-01",
        content_type="application/json",
        headers=Headers({"tenant": "acme"}),
    )
    assert to_wire(sent) == (
        ("ce_specversion", b"1.0"),
        ("ce_id", b"m-1"),
        ("ce_type", b"order.placed"),
        ("ce_source", b"/shop"),
        ("ce_time", b"2026-03-01T12:30:15.000250Z"),
        ("ce_dataschema", b"order/v1"),
        ("ce_correlationid", b"c"),
        ("ce_causationid", b"p"),
        ("ce_traceparent", b"00-aa-bb-01"),
        ("ce_partitionkey", b"o-7"),
        ("content-type", b"application/json"),
        ("tenant", b"acme"),
    )


def test_http_and_nats_values_are_percent_encoded() -> None:
    """Headers of these bindings hold printable ASCII only."""
    wire = dict(to_wire(message(type="é %\n", key=b"a b"), prefix="ce-"))
    assert wire["ce-type"] == b"%C3%A9%20%25%0A"
    assert wire["ce-partitionkey"] == b"a%20b"


def test_capitalised_http_names_are_understood() -> None:
    """HTTP libraries write Ce-Id and Content-Type."""
    received = arrive([("Ce-Id", b"m%201"), ("Content-Type", b"text/plain")])
    assert (received.id, received.content_type, len(received.headers)) == ("m 1", "text/plain", 0)


def test_time_is_written_in_utc_with_six_digits() -> None:
    """Times have one width, so they sort as text."""
    assert rfc3339(datetime(2026, 1, 1, tzinfo=UTC)) == b"2026-01-01T00:00:00.000000Z"
    east = datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert rfc3339(east) == b"2025-12-31T23:00:00.000000Z"


def test_a_time_that_utc_cannot_hold_is_refused() -> None:
    """The last hour of the year 9999 west of Greenwich has no UTC time."""
    beyond = datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-7)))
    with pytest.raises(InvalidMessage, match="9999"):
        to_wire(message(time=beyond))


def test_a_lone_surrogate_is_refused() -> None:
    """Text that UTF-8 cannot hold is named before anything is sent."""
    with pytest.raises(InvalidMessage, match="surrogate"):
        to_wire(message(type="\ud800"))


def test_an_unknown_prefix_is_refused() -> None:
    """A misspelt prefix would make messages that no one recognises."""
    with pytest.raises(ConfigurationError, match="ce_, ce-"):
        to_wire(message(), prefix="ce.")


def test_a_foreign_message_gets_the_derived_id() -> None:
    """A message that is no event is read with fallbacks, never refused."""
    received = arrive([("tenant", b"acme")], key=b"k", body=b"\x00")
    assert received == Message(
        id="derived",
        topic="orders",
        payload=b"\x00",
        source="topic:orders",
        key=b"k",
        headers=Headers({"tenant": "acme"}),
        time=NOW,
    )


@pytest.mark.parametrize(
    "header",
    [
        ("ce_id", b""),
        ("ce_id", b"\xff"),
        ("ce_id", None),
        ("ce_time", b"yesterday"),
        ("ce_time", b"2026-03-01T12:00:00"),
        ("ce_time", b"0001-01-01T00:00:00+05:00"),
        ("ce_type", b"\xff"),
        ("ce_specversion", b"0.3"),
        ("ce_partitionkeybase64", b"!"),
        ("ce-source", b"%ff"),
        ("content-type", b"\xff"),
        ("traceparent", b"\xff"),
    ],
)
def test_a_malformed_attribute_is_replaced_and_kept(header: Pair) -> None:
    """The fallback stands in, and the raw header stays where it was."""
    given_ = [("a", b"1"), header, ("b", b"2")]
    received = arrive(given_)
    assert received == arrive([]).with_(headers=Headers.received(given_))


def test_a_partition_key_that_contradicts_the_broker_is_kept_as_header() -> None:
    """The broker's key decides order, so it wins."""
    received = arrive([("ce_partitionkey", b"other")], key=b"own")
    assert received.key == b"own"
    assert received.headers.get("ce_partitionkey") == b"other"


def test_a_plain_traceparent_is_read_and_stays() -> None:
    """Tracing libraries look for the W3C header, so it is not taken away."""
    received = arrive([("traceparent", b"00-aa-bb-01")])
    assert received.traceparent == "00-aa-bb-01"
    assert received.headers.get("traceparent") == b"00-aa-bb-01"


def test_the_event_attribute_wins_over_a_plain_traceparent() -> None:
    """The plain one may have been rewritten by an intermediary's own span."""
    received = arrive([("traceparent", b"hop"), ("ce_traceparent", b"origin")])
    assert received.traceparent == "origin"


def test_unknown_attributes_stay_headers() -> None:
    """An extension that Holdfast has no field for is not lost."""
    assert arrive([("ce_tenant", b"acme")]).headers == Headers({"ce_tenant": "acme"})


def test_a_structured_event_is_recognised_by_its_content_type() -> None:
    """Media types ignore case and may carry parameters."""
    body = b'{"specversion":"1.0","id":"e-1","source":"/s","type":"t","data":{"a":1},"n":7}'
    received = arrive([("Content-Type", b"Application/CloudEvents+JSON; charset=utf-8")], body=body)
    assert (received.id, received.source, received.type) == ("e-1", "/s", "t")
    assert (received.payload, received.content_type) == (b'{"a":1}', "application/json")
    assert received.headers == Headers({"ce_n": "7"})


def test_a_broken_structured_event_is_left_for_the_decoder_to_refuse() -> None:
    """A dead letter needs a message, so reading does not raise."""
    received = arrive([("content-type", STRUCTURED.encode())], body=b'{"id":')
    assert (received.id, received.payload, received.content_type) == (
        "derived",
        b'{"id":',
        STRUCTURED,
    )


def test_a_header_that_repeats_the_id_survives_structured_mode() -> None:
    """The attribute is read from the event, the header stays a header."""
    sent = message(headers=Headers({"ce_id": "m-1", "ce_tenant": "acme"}))
    assert unwrap(to_structured(sent), headers=sent.headers) == sent


def test_structured_json_data_is_embedded_and_other_data_is_base64() -> None:
    """Other readers find JSON as JSON."""
    assert json.loads(to_structured(message(content_type="application/json")))["data"] == {}
    event = json.loads(to_structured(message(payload=b"\xff", content_type="image/png")))
    assert (event["data_base64"], event["datacontenttype"]) == ("/w==", "image/png")
    assert "data" not in json.loads(to_structured(message(payload=None)))


def test_structured_text_data_is_a_string() -> None:
    """Text of another kind than JSON is written as a JSON string by other producers."""
    received = unwrap(b'{"id":"1","datacontenttype":"text/plain","data":"a\\n\\u00e9"}')
    assert received.payload == "a\né".encode()


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b'{"id": x}', "byte 7"),
        (b'{"id": "1"', "end"),
        (b'{"id": "\xff"}', "byte 8"),
        (b"[1]", "$"),
        (b"[" * 100_000, "$"),
        (b'{"id": {}}', "$.id"),
        (b'{"time": 1.5}', "$.time"),
        (b'{"data_base64": "*"}', "$.data_base64"),
    ],
)
def test_what_is_no_structured_event_is_refused_with_the_position(
    body: bytes, position: str
) -> None:
    """The error says where to look."""
    with pytest.raises(DecodeFailed) as caught:
        unwrap(body)
    assert caught.value.position == position
