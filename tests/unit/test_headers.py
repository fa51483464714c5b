"""Headers: ordered, multi-valued, binary, and refused early when they could not travel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidMessage
from holdfast.headers import EMPTY, Headers


def test_a_name_may_repeat_and_the_last_value_is_the_value() -> None:
    """Brokers deliver several headers of one name; none is dropped."""
    headers = Headers([("a", "1"), ("b", "2"), ("a", "3")])
    assert headers.all("a") == [b"1", b"3"]
    assert headers.get("a") == b"3"
    assert len(headers) == 3


def test_binary_and_absent_values_are_kept_apart_from_empty_ones() -> None:
    """None, empty and arbitrary bytes are three different values."""
    headers = Headers({"none": None, "empty": "", "raw": b"\xff\x00"})
    assert [value for _, value in headers] == [None, b"", b"\xff\x00"]
    assert "none" in headers
    assert headers.text("raw") == "\ufffd\x00"
    assert headers.text("none") is None


def test_an_absent_name_has_no_value() -> None:
    """Asking for a header that is not there is no error."""
    assert (EMPTY.get("a"), EMPTY.text("a"), EMPTY.all("a"), "a" in EMPTY) == (
        None,
        None,
        [],
        False,
    )


@pytest.mark.parametrize("name", ["", "a b", "a:b", "ü", "a\n", 7, None])
def test_a_bad_name_is_refused_and_named(name: Any) -> None:
    """The error shows the name and says what is allowed."""
    with pytest.raises(InvalidMessage, match="use") as caught:
        Headers([(name, "1")])
    assert repr(name) in str(caught.value)


def test_a_long_name_is_refused_with_its_length() -> None:
    """AMQP takes 255 characters, so no broker gets more."""
    with pytest.raises(InvalidMessage, match="256 characters, at most 255"):
        Headers({"x" * 256: "1"})


@pytest.mark.parametrize("value", [1, 1.5, True, ["a"], {}, object()])
def test_a_value_that_is_no_text_is_refused_with_the_fix(value: Any) -> None:
    """The error names the header, the type and the way out."""
    with pytest.raises(InvalidMessage, match=rf"'a' has a {type(value).__name__}: pass str"):
        Headers({"a": value})


def test_text_that_is_not_utf8_is_refused() -> None:
    """A lone surrogate cannot be written."""
    with pytest.raises(InvalidMessage, match="'a' is no UTF-8 text: pass bytes"):
        Headers({"a": "\ud800"})


@given(st.lists(st.tuples(st.text(), st.none() | st.binary())))
def test_received_headers_are_kept_exactly(pairs: list[tuple[str, bytes | None]]) -> None:
    """What a broker delivered is neither checked nor changed."""
    assert list(Headers.received(pairs)) == pairs


def test_replacing_a_header_replaces_all_of_its_values() -> None:
    """A copy carries the new value only, and the original stays as it was."""
    headers = Headers([("a", "1"), ("b", "2"), ("a", "3")])
    assert headers.with_({"a": "4"}).pairs == (("b", b"2"), ("a", b"4"))
    assert headers.without(["a"]).pairs == (("b", b"2"),)
    assert len(headers) == 3


def test_headers_are_values() -> None:
    """Equal pairs are equal, hash alike, and count names and values in bytes."""
    one, other = Headers({"a": "é"}), Headers([("a", "é".encode())])
    assert (one, hash(one)) == (other, hash(other))
    assert one != Headers()
    assert one.size == 3
