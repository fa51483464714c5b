"""A look that hangs or fails is a finding; it spoils no other look, and nobody waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import BrokerDown, ConfigurationError
from holdfast.findings import Finding, Look, Severity
from holdfast.status.looking import Looking

if TYPE_CHECKING:
    from collections.abc import Iterator

FINE = Finding(check="keys", severity=Severity.OK, text="none is held")


def _failing() -> Iterator[Finding]:
    yield FINE
    raise LookupError("postgresql://u:hunter2@db/shop is odd")


def test_a_look_that_hangs_is_given_up_and_the_rest_is_seen() -> None:
    """What it would have looked at is named, with how to give it more time."""
    forever = threading.Event()

    def hang() -> list[Finding]:
        forever.wait()
        return []

    looks = Looking([Look("keys", lambda: [FINE])])
    assert looks.findings(60.0) == [FINE]
    (late,) = Looking([Look("sagas", hang)]).findings(0.01)
    forever.set()
    assert (late.check, late.severity) == ("sagas", Severity.UNSEEN)
    assert "--within" in str(late.fix)


def test_a_look_that_fails_is_named_without_secrets_and_the_rest_is_seen() -> None:
    """No traceback, and none of what it had found so far."""
    found = Looking([Look("sagas", _failing), Look("keys", lambda: [FINE])]).findings(60.0)
    assert [(one.check, one.severity) for one in found] == [
        ("sagas", Severity.UNSEEN), ("keys", Severity.OK),
    ]  # fmt: skip
    assert "hunter2" not in found[0].text
    assert found[0].fix


def test_who_does_not_answer_is_down_and_wrong_settings_are_raised() -> None:
    """Waiting mends the one and not the other."""

    def silent() -> list[Finding]:
        raise BrokerDown("nobody listens")

    def wrong() -> list[Finding]:
        raise ConfigurationError("no such scheme")

    (down,) = Looking([Look("broker", silent)]).findings(60.0, down="start it")
    assert (down.severity, down.fix) == (Severity.DOWN, "start it")
    with pytest.raises(ConfigurationError):
        Looking([Look("broker", wrong)]).findings(60.0, down="start it")
