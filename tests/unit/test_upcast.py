"""Upcasting: yesterday's events reach today's handlers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, DecodeFailed, Transient
from holdfast.headers import Headers
from holdfast.message import Message
from holdfast.upcast import Upcasters, version_of

Event = dict[str, Any]


def message(payload: bytes | None = b'{"name":"Ada Lovelace"}', **fields: Any) -> Message:
    known: dict[str, Any] = {"type": "user.named", "schema": "user-named/v1"}
    return Message(
        id="m-1", topic="users", payload=payload, time=datetime(2026, 1, 1, tzinfo=UTC),
        **known | fields,
    )  # fmt: skip


@pytest.fixture
def upcasters() -> Upcasters:
    registry = Upcasters()

    @registry.upcast("user.named", 1)
    def split(event: Event) -> Event:
        first, last = event.pop("name").split()
        return event | {"first": first, "last": last}

    @registry.upcast("user.named", 2)
    def nest(event: Event) -> Event:
        return {"name": event}

    return registry


def test_an_old_event_climbs_to_the_newest_version(upcasters: Upcasters) -> None:
    """Each step takes the result of the one before."""
    raised = upcasters.apply(message())
    assert json.loads(raised.payload or b"") == {"name": {"first": "Ada", "last": "Lovelace"}}
    assert raised.schema == "user-named/v3"
    assert raised == message(raised.payload, schema="user-named/v3")


def test_an_event_enters_the_chain_at_its_own_version(upcasters: Upcasters) -> None:
    """Steps below its version are not for it."""
    raised = upcasters.apply(message(b'{"first":"Ada"}', schema="user-named/v2"))
    assert json.loads(raised.payload or b"") == {"name": {"first": "Ada"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": "user-named/v1"},
        {"schema": None},
        {"schema": None, "headers": Headers({"ce_schemaversion": "1"})},
        {"schema": "v9", "headers": Headers.received([("cloudEvents:schemaversion", b"1")])},
    ],
)
def test_upcasting_again_changes_nothing(upcasters: Upcasters, fields: dict[str, Any]) -> None:
    """The result says which version it is, wherever that stood before."""
    once = upcasters.apply(message(**fields))
    assert version_of(once) == 3
    assert upcasters.apply(once) is once


@pytest.mark.parametrize(
    "untouched",
    [
        message(b"not json", type="order.placed"),
        message(b"not json", type="order.placed", schema="no version here"),
        message(b"not json", schema="user-named/v3"),
        message(b"not json", schema="user-named/v4"),
        message(None),
    ],
)
def test_what_needs_no_step_is_not_even_decoded(upcasters: Upcasters, untouched: Message) -> None:
    """Other types, current versions and tombstones cost nothing."""
    assert upcasters.apply(untouched) is untouched


@pytest.mark.parametrize(
    ("schema", "version"),
    [
        (None, 1),
        ("2", 2),
        ("v2", 2),
        ("order-placed:2", 2),
        ("urn:shop:order-placed:v2", 2),
        ("https://schemas.example/order-placed/v12", 12),
        ("order-placed;version=3", 3),
        ("https://schemas.example/order-placed?lang=en&version=3", 3),
    ],
)
def test_the_version_is_the_end_of_the_schema_reference(schema: str | None, version: int) -> None:
    """The forms of the rule, and 1 for none."""
    assert version_of(message(schema=schema)) == version


def test_the_explicit_version_wins() -> None:
    """An extension that says the version needs no guess from the reference."""
    headers = Headers({"ce_schemaversion": "5"})
    assert version_of(message(headers=headers, schema="user-named/v2")) == 5


@pytest.mark.parametrize(
    "schema", ["", "order-placed", "http://host:8081", "x/v2.1", "x/2", "v" + "9" * 99]
)
def test_a_reference_without_a_version_is_refused(schema: str) -> None:
    """A wrong guess would corrupt the event."""
    with pytest.raises(DecodeFailed, match=r"end it in /v2 or set ce_schemaversion"):
        version_of(message(schema=schema))


def test_an_explicit_version_that_is_no_integer_is_refused() -> None:
    """The error names the header."""
    with pytest.raises(DecodeFailed, match="'two' is not an integer") as caught:
        version_of(message(headers=Headers({"ce_schemaversion": "two"})))
    assert caught.value.position == "ce_schemaversion"


@given(st.text())
def test_any_reference_has_a_version_or_is_refused(schema: str) -> None:
    """No text makes reading the version crash."""
    try:
        assert version_of(message(schema=schema)) >= 0
    except DecodeFailed as error:
        assert error.position == "schema"  # noqa: PT017 - not raising is as good


def test_a_gap_in_the_chain_is_refused(upcasters: Upcasters) -> None:
    """The error names the step that is missing."""
    upcasters.upcast("user.named", 4)(lambda event: event)
    with pytest.raises(DecodeFailed, match=r"add @upcast\('user.named', 3\)"):
        upcasters.apply(message())


def test_a_version_newer_than_the_declared_one_is_refused(upcasters: Upcasters) -> None:
    """An old consumer does not misread new events."""
    upcasters.declare_latest("user.named", 3)
    assert upcasters.apply(message()).schema == "user-named/v3"
    with pytest.raises(DecodeFailed, match="version 4 is newer than 3: deploy"):
        upcasters.apply(message(schema="user-named/v4"))


def test_a_declared_version_needs_no_upcaster() -> None:
    """A type without history may still refuse its future."""
    registry = Upcasters()
    registry.declare_latest("user.named", 1)
    assert registry.apply(message()) == message()
    with pytest.raises(DecodeFailed, match="newer than 1"):
        registry.apply(message(schema="v2"))


def test_a_failing_upcaster_is_poison(upcasters: Upcasters) -> None:
    """The event is at fault as far as anyone can tell, and can be replayed after a fix."""
    with pytest.raises(DecodeFailed, match=r"upcaster .*split failed: KeyError: 'name'") as caught:
        upcasters.apply(message(b"{}"))
    assert caught.value.position == "version 1"


def test_an_error_that_states_its_remedy_keeps_it() -> None:
    """An outage inside an upcaster is not made poison."""
    registry = Upcasters()

    @registry.upcast("user.named", 1)
    def busy(event: Event) -> Event:
        raise Transient("busy")

    with pytest.raises(Transient):
        registry.apply(message())


@pytest.mark.parametrize(
    ("result", "reason"), [(None, "returned NoneType"), ({"a": 3j}, "is not JSON")]
)
def test_an_upcaster_that_returns_no_event_is_refused(result: Any, reason: str) -> None:
    """A forgotten return statement does not become an empty event."""
    registry = Upcasters()
    registry.upcast("user.named", 1)(lambda event: result)
    with pytest.raises(DecodeFailed, match=reason):
        registry.apply(message())


def test_a_payload_that_is_no_object_is_refused_with_its_position(upcasters: Upcasters) -> None:
    """Upcasters see dicts only."""
    with pytest.raises(DecodeFailed, match="byte 1"):
        upcasters.apply(message(b"{x"))
    with pytest.raises(DecodeFailed, match="Expected `object`"):
        upcasters.apply(message(b"[]"))


def test_two_upcasters_for_one_version_are_refused(upcasters: Upcasters) -> None:
    """Which of them ran would depend on the order of imports."""
    with pytest.raises(
        ConfigurationError, match=r"two upcasters from version 1, .*split and .*lambda"
    ):
        upcasters.upcast("user.named", 1)(lambda event: event)


@pytest.mark.parametrize("version", [0, -1])
def test_versions_count_from_one(version: int) -> None:
    """A message without a version is version 1, so nothing lies below."""
    with pytest.raises(ConfigurationError, match="count from 1"):
        Upcasters().upcast("user.named", version)
    with pytest.raises(ConfigurationError, match="count from 1"):
        Upcasters().declare_latest("user.named", version)
