"""Change events are read from Debezium's JSON, and columns are written as Debezium does."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Message
from holdfast.cloudevents import from_wire
from holdfast.errors import DecodeFailed
from holdfast.outbox.cdc.envelope import ChangeEnvelope, ChangeOrigin, Shape, array, scalar
from holdfast.outbox.cdc.events import UNAVAILABLE, change_event
from holdfast.outbox.wal.pgoutput import UNCHANGED, Update

SOURCE = {"name": "shop", "db": "d", "schema": "public", "table": "item", "txId": 7, "lsn": 99}
EVENT = {"before": None, "after": {"id": 1}, "source": SOURCE, "op": "c", "ts_ms": 5}


def message(payload: Any, key: Any = None) -> Message:
    """Return a message as a Kafka consumer gets it."""
    body = None if payload is None else json.dumps(payload).encode()
    return Message.new("shop.public.item", body, key=None if key is None else json.dumps(key))


def test_an_event_reads_the_same_with_and_without_schemas() -> None:
    """JsonConverter wraps key and value when schemas are enabled."""
    plain = change_event(message(EVENT, {"id": 1}))
    wrapped = change_event(
        message({"schema": {}, "payload": EVENT}, {"schema": {}, "payload": {"id": 1}})
    )
    assert plain == wrapped
    assert (plain.op, plain.after, plain.key) == ("c", {"id": 1}, {"id": 1})
    assert plain.source is not None
    assert (plain.source.table, plain.source.tx, plain.source.lsn) == ("item", 7, 99)


def test_a_tombstone_has_a_key_and_nothing_else() -> None:
    """An empty value, or a null inside the wrapper."""
    for payload in (None, {"schema": None, "payload": None}):
        event = change_event(message(payload, {"id": 1}))
        assert event.is_tombstone
        assert event.key == {"id": 1}


@pytest.mark.parametrize(
    "payload", [{"a": 1}, [1], "text", {"op": 1}, {"op": "c", "after": 5}, {"payload": {"x": 1}}]
)
def test_what_is_no_change_event_is_refused(payload: Any) -> None:
    """The failure names the place."""
    with pytest.raises(DecodeFailed):
        change_event(message(payload))


@given(st.binary())
def test_no_bytes_make_anything_but_decode_failed(body: bytes) -> None:
    """Whatever a topic holds."""
    try:
        change_event(Message.new("t", body, key=body))
    except DecodeFailed:
        return


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (16, "t", True), (16, "f", False), (23, "-5", -5), (20, str(2**62), 2**62),
        (701, "1.5", 1.5), (701, "NaN", "NaN"), (701, "-Infinity", "-Infinity"),
        (1700, "1.50", "1.50"), (17, "\\x00ff", "AP8="), (3802, '{"a": 1}', '{"a": 1}'),
        (1082, "1970-01-11", 10), (1082, "infinity", "infinity"),
        (1114, "1970-01-01 00:00:01.5", 1_500_000), (1114, "0044-03-15 00:00:00 BC",
         "0044-03-15 00:00:00 BC"),
        (1184, "2026-01-31 10:20:30.5+00", "2026-01-31T10:20:30.500000Z"),
        (1184, "0001-01-31 10:20:30+00", "0001-01-31T10:20:30.000000Z"),
        (1184, "infinity", "infinity"),
        (1083, "01:00:00.000001", 3_600_000_001), (1083, "24:00:00", 86_400_000_000),
        (1266, "01:02:03+02", "23:02:03Z"), (1266, "12:00:00.5-08", "20:00:00.5Z"),
        (1186, "P1Y2M3DT4H5M6.5S", "P1Y2M3DT4H5M6.5S"), (1186, "P-1D", "P0Y0M-1DT0H0M0S"),
        (1186, "PT0S", "P0Y0M0DT0H0M0S"), (1560, "101", "BQ=="), (1562, "", ""),
        (2950, "0b9e-x", "0b9e-x"),
    ],
)  # fmt: skip
def test_columns_are_written_as_documented(kind: int, text: str, value: Any) -> None:
    """One line of the table in the module each."""
    read = scalar(kind)
    assert read is not None
    assert read(text) == value


@pytest.mark.parametrize(
    ("kind", "modifier", "text", "value"),
    [
        (1114, 3, "1970-01-01 00:00:01.5", 1500), (1114, 6, "1970-01-01 00:00:01.5", 1_500_000),
        (1114, 0, "infinity", "infinity"), (1083, 3, "01:00:00.001", 3_600_001),
        (1184, 3, "2026-01-31 10:20:30.5+00", "2026-01-31T10:20:30.500Z"),
        (1184, 0, "2026-01-31 10:20:30+00", "2026-01-31T10:20:30Z"), (1560, 1, "1", True),
    ],
)  # fmt: skip
def test_a_coarser_type_is_written_coarser(kind: int, modifier: int, text: str, value: Any) -> None:
    """As Debezium does with its default of time.precision.mode."""
    read = scalar(kind, modifier)
    assert read is not None
    assert read(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{1,NULL,3}", ["1", None, "3"]), ("{}", []),
        ('{a,"b,\\"c\\\\","NULL",NULL}', ["a", 'b,"c\\', "NULL", None]),
        ("{{1,2},{3,4}}", "{{1,2},{3,4}}"), ("[0:1]={1,2}", "[0:1]={1,2}"),
    ],
)  # fmt: skip
def test_an_array_is_taken_apart_if_it_has_one_dimension(text: str, value: Any) -> None:
    """Quotes and nulls are told apart; anything else stays as PostgreSQL writes it."""
    assert array(str)(text) == value


SHAPE = Shape.of("public", "item", [("id", int), ("name", str), ("big", str)], ["id"])
ORIGIN = ChangeOrigin(lsn=10, tx=3, time=datetime(2026, 1, 1, tzinfo=UTC))
ENVELOPE = ChangeEnvelope("shop", "db")


def read(messages: Any) -> list[Any]:
    """Return the events in *messages*."""
    return [change_event(message) for message in messages]


def test_an_unsent_large_column_is_marked_or_taken_from_the_old_row() -> None:
    """It is never written as null, which would look like a change."""
    new = [b"1", b"b", UNCHANGED]
    (event,) = read(ENVELOPE.updated(SHAPE, Update(1, None, new), ORIGIN, 1))
    assert event.after["big"] == UNAVAILABLE
    whole = Update(1, [b"1", b"a", b"large"], new, whole=True)
    (event,) = read(ENVELOPE.updated(SHAPE, whole, ORIGIN, 1))
    assert event.after["big"] == "large"


def test_an_old_key_tells_nothing_about_the_other_columns() -> None:
    """They are empty in it, whatever they hold; an unsent key is in it, though."""
    moved = Update(1, [b"1", None, None], [b"2", b"b", UNCHANGED])
    *_, event = read(ENVELOPE.updated(SHAPE, moved, ORIGIN, 1))
    assert event.after == {"id": 2, "name": "b", "big": UNAVAILABLE}
    same = Update(1, [b"1", None, None], [UNCHANGED, b"b", None])
    (event,) = read(ENVELOPE.updated(SHAPE, same, ORIGIN, 1))
    assert event.after == {"id": 1, "name": "b", "big": None}


def test_a_new_key_is_a_delete_a_tombstone_and_an_insert() -> None:
    """Consumers that hold rows by key must forget the old one."""
    moved = Update(1, [b"1", None, None], [b"2", b"b", None])
    events = read(ENVELOPE.updated(SHAPE, moved, ORIGIN, 1))
    assert [(event.op, event.key) for event in events] == [
        ("d", {"id": 1}), (None, {"id": 1}), ("c", {"id": 2}),
    ]  # fmt: skip


def test_a_change_has_the_same_id_whenever_it_is_published() -> None:
    """And no two changes share one."""
    once = [m.id for m in ENVELOPE.deleted(SHAPE, [b"1", None, None], ORIGIN, 1)]
    again = [m.id for m in ENVELOPE.deleted(SHAPE, [b"1", None, None], ORIGIN, 1)]
    other = [m.id for m in ENVELOPE.inserted(SHAPE, [b"1", None, None], ORIGIN, 2)]
    assert once == again
    assert len({*once, *other}) == 3


def test_a_table_without_a_key_makes_messages_without_one() -> None:
    """And no tombstones, which would need it."""
    shape = Shape.of("public", "log", [("line", str)], [])
    assert [m.key for m in ENVELOPE.deleted(shape, [b"x"], ORIGIN, 1)] == [None]


def test_a_truncated_table_is_an_event_without_a_key() -> None:
    """It is about all of them; tables that are emptied together are told apart."""
    first = ENVELOPE.truncated(SHAPE, ORIGIN, 1)
    other = ENVELOPE.truncated(Shape.of("public", "log", [], []), ORIGIN, 1)
    event = change_event(first)
    assert (event.op, event.key, event.before, event.after) == ("t", None, None, None)
    assert first.id != other.id


def test_a_topic_holds_only_what_every_broker_takes() -> None:
    """Anything else becomes _, as Debezium does."""
    assert ENVELOPE.topic("public", "Order Line") == "shop.public.Order_Line"


def routed(*headers: tuple[str, bytes | None]) -> Message:
    """Return what a consumer gets for a message with *headers*."""
    return from_wire(
        topic="orders",
        key=b"k",
        body=b"{}",
        headers=headers,
        fallback_id=lambda: "fallback",
        fallback_time=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_the_routers_headers_are_read_as_ours() -> None:
    """Id, type, correlation and the user's own headers come out of the header `holdfast`."""
    wire = [["ce_id", "i"], ["ce_type", "T"], ["ce_correlationid", "c"], ["x", {"base64": "/w=="}]]
    packed = json.dumps(wire).encode()
    got = routed(("id", b"i"), ("holdfast", packed), ("__debezium.task", b"0"), ("more", b"1"))
    assert (got.id, got.type, got.correlation_id) == ("i", "T", "c")
    assert got.headers.pairs == (("x", b"\xff"), ("more", b"1"))


def test_a_strangers_outbox_has_its_id_at_least() -> None:
    """The router's own header `id` is the identity; anything else in it is just a header."""
    own = b"01234567-89ab-cdef-0123-456789abcdef"
    assert routed(("id", own)).id == own.decode()
    assert routed(("id", b"77")).id == "fallback"


@given(st.binary())
def test_garbage_in_the_routers_header_is_just_a_header(value: bytes) -> None:
    """Nothing that a topic holds makes reading fail."""
    assert routed(("holdfast", value)).topic == "orders"
