"""Messages whose headers are still packed."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.cloudevents import to_wire
from holdfast.message import Message
from holdfast.outbox.rows import Row, staged
from holdfast.stored_message import StoredMessage, packed


def _staged(**headers: str | bytes | None) -> StoredMessage:
    message = Message.new("t", b"x", key="k", headers=list(headers.items()))
    text = msgspec.json.encode(packed(to_wire(message))).decode()
    return staged(Row(1, 7, "t", "k", b"x", text, message.id, "message"))


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
