"""Windows, keys and plans of the inbox: values that need no database."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from holdfast.db.text import all_fit, fitted
from holdfast.durations import as_text, in_seconds
from holdfast.errors import ConfigurationError, PlanError
from holdfast.idempotency import Inbox, idempotency_key, idempotent
from holdfast.idempotency.identity import content_digest, message_key
from holdfast.retry import retry


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30s", 30),
        ("90m", 5400),
        ("1.5h", 5400),
        ("14d", 1209600),
        (" 2 w ", 1209600),
        (60, 60),
        (timedelta(hours=1), 3600),
    ],
)
def test_a_window_is_read_as_people_write_it(written: Any, seconds: float) -> None:
    assert in_seconds(written, of="window") == seconds


@pytest.mark.parametrize(
    "nonsense", ["", "14", "d", "-1d", "0s", "14 days", "1e3s", 0, -5, True, None, [], float("inf")]
)
def test_nonsense_for_a_window_is_refused_with_the_fix(nonsense: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'window=.*"14d"'):
        in_seconds(nonsense, of="window")


def test_a_bad_window_fails_when_the_function_is_decorated() -> None:
    with pytest.raises(ConfigurationError, match="fortnight"):
        idempotent(window="a fortnight")


def test_a_window_is_shown_as_it_was_written() -> None:
    for written in ("14d", "90m", "2w", "36h", "5s"):
        assert in_seconds(as_text(in_seconds(written, of="w")), of="w") == in_seconds(
            written, of="w"
        )
    assert as_text(1209600) == "2w"
    assert as_text(5400) == "90m"


def test_a_uuid_keeps_its_bytes_and_so_its_order() -> None:
    text = "0190163d-8694-739b-aea5-966c26f8ad91"
    assert message_key(text) == uuid.UUID(text).bytes


@pytest.mark.parametrize(
    "other",
    [
        "0190163D-8694-739B-AEA5-966C26F8AD91",
        "0190163d8694739baea5966c26f8ad91",
        "0190163d-8694-739b-aea5-966c26f8ad9 ",
        "0190163d-8694-739b-aea5-966c26f8ad9g",
        "{0190163d-8694-739b-aea5-966c26f8ad91}",
        "٠190163d-8694-739b-aea5-966c26f8ad91",
    ],
)
def test_ids_that_only_resemble_a_uuid_are_ids_of_their_own(other: str) -> None:
    key = message_key(other)
    assert len(key) == 16
    assert key != uuid.UUID("0190163d-8694-739b-aea5-966c26f8ad91").bytes


def test_a_tombstone_has_a_digest_of_its_own() -> None:
    assert len({content_digest(None), content_digest(b""), content_digest(b"x"), bytes(8)}) == 4


def test_a_name_fits_its_column() -> None:
    assert fitted("short") == "short"
    assert fitted("x" * 255) == "x" * 255
    assert len(fitted("x" * 256)) < 255
    assert fitted("x" * 256) != fitted("x" * 257)
    assert "\0" not in fitted("a\0b")


@pytest.mark.parametrize(
    "name", ["", "short", "x" * 255, "x" * 256, "a\0b", "a\x1fb", "ü€😀", "\ud83d", "\n"]
)
def test_names_that_all_fit_are_those_that_are_taken_as_they_are(name: str) -> None:
    assert all_fit(["id", name]) == (fitted(name) == name)
    assert not all_fit(["\ud83d", "\ude00"])


def test_the_key_for_an_external_api_is_the_same_on_every_attempt() -> None:
    assert idempotency_key("billing/f", "m1") == idempotency_key("billing/f", "m1")
    assert idempotency_key("billing/f", "m1") != idempotency_key("mail/f", "m1")
    assert idempotency_key("billing/f", "m1") != idempotency_key("billing/f", "m2")


def test_dedup_outside_a_retry_is_refused() -> None:
    with pytest.raises(PlanError, match="never retried"):

        @idempotent
        @retry()
        def bill() -> None: ...


def test_one_layer_may_decorate_several_functions() -> None:
    once = idempotent(window="14d")
    one, two = once(lambda a: a), once(lambda b: b)
    assert one.plan.layers[0] is not two.plan.layers[0]
    assert "2w" in one.explain()


def test_settings_have_names() -> None:
    with pytest.raises(ConfigurationError, match="window='14d'"):
        idempotent("14d")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="function of the payload"):
        idempotent(key="id")  # type: ignore[call-overload]


def test_a_memory_for_ever_is_said_so() -> None:
    assert Inbox(window=None).window is None
    assert "for ever" in idempotent(window=None)(lambda a: a).explain()
