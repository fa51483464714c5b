"""Messages whose headers are still packed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from holdfast.cloudevents import to_wire
from holdfast.errors import InvalidMessage
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.outbox.rows import Row, StagedRows, staged, values
from holdfast.stored_message import StoredMessage, packed

NOW = datetime.now(UTC)


def _staged(**headers: str | bytes | None) -> StoredMessage:
    message = Message.new("t", b"x", key="k", headers=list(headers.items()))
    text = msgspec.json.encode(packed(to_wire(message))).decode()
    return staged(Row(1, 7, "t", "k", b"x", text, message.id, "message"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"key": "schlüssel", "type": "Größe"},
        {"key": b""},
        {"key": None, "content_type": "text/plain", "schema": "https://x/é"},
        {"source": "/läden", "headers": {"x": "plain", "y": "grün"}},
        {"headers": [("twice", "a"), ("twice", "b"), ("none", None)]},
        {"headers": [("binary", b"\xff"), ("zero", "a\0b")]},
    ],
)
def test_a_row_keeps_the_headers_of_its_message_exactly(more: dict[str, Any]) -> None:
    """Plain ones are written another way, which is faster."""
    message = Message.new("t", b"x", **{"key": "k", **more})
    text = msgspec.json.encode(values(message)["headers"]).decode()
    assert text == msgspec.json.encode(packed(to_wire(message))).decode()
    assert staged(Row(1, 7, "t", None, b"x", text, message.id, "m")).wire == to_wire(message)


@pytest.mark.parametrize("name", ["topic", "key", "type"])
@pytest.mark.parametrize("text", ["a\0", "n" * 256])
def test_a_text_that_no_database_takes_is_refused_by_its_name(name: str, text: str) -> None:
    """Whatever stands in the other columns."""
    with pytest.raises(InvalidMessage, match=name):
        values(
            Message(
                **{"id": new_id(), "topic": "t", "payload": b"", "time": NOW, name: _of(name, text)}
            )
        )


def _of(name: str, text: str) -> str | bytes:
    return text.encode() if name == "key" else text


def test_headers_of_text_are_the_same_headers() -> None:
    """A client that writes text as UTF-8 sends what one gets that is given bytes."""
    message = _staged(colour="grün", empty="")
    assert message.texts is not None
    assert [(name, value.encode()) for name, value in message.texts] == list(message.wire)


@pytest.mark.parametrize("value", [b"\xff", None, "a\0b"])
def test_what_is_not_text_or_would_be_cut_off_is_sent_as_bytes(value: str | bytes | None) -> None:
    """Binary, null, and a null character within."""
    assert _staged(odd=value).texts is None


def test_rows_of_others_are_sent_as_bytes() -> None:
    """They lack the headers that say who they are."""
    row = Row(1, 7, "t", "k", b"x", '{"a": "b"}', "0190b8a0-0000-7000-8000-000000000000", "m")
    assert staged(row).texts is None


def test_what_a_client_sends_of_rows_is_what_their_messages_hold() -> None:
    """Also of rows that others wrote, whose headers say less, and whose ids have no dashes."""
    own = "0190b8a0000070008000000000000000"
    ours = msgspec.json.encode(packed(to_wire(Message.new("t", b"x", key="k")))).decode()
    rows = StagedRows(
        [
            (1, 7, "t", "k", b"x", ours, own, "message"),
            (2, 7, "u", None, None, '[["odd", "a\\u0000b"]]', own, "m"),
            (3, 8, "t", "ü", b"", '{"a": "b"}', own, "m"),
        ]
    )
    sent = [
        (topic, payload, _as_bytes(key), [(name, _as_bytes(value)) for name, value in headers])
        for topic, payload, key, headers in rows.records()
    ]
    assert sent == [(m.topic, m.payload, m.key, list(m.wire)) for m in rows]
    assert rows.topics == ["t", "u", "t"]
    assert [rows[place] for place in range(3)] == list(rows)
    assert list(rows[1:]) == list(rows)[1:]


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
