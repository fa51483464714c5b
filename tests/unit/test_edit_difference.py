"""What an edit changed can be read later, without what must not be seen."""

from __future__ import annotations

import hashlib

from holdfast import Message
from holdfast.dlq.replay.edits import difference


def made(**headers: str) -> Message:
    return Message.new("orders", b'{"n": 1}', headers=headers, ids=lambda: "1")


def test_a_changed_credential_shows_as_changed_and_cannot_be_tried_out() -> None:
    """The difference is stored: a digest of a short password would tell it."""
    text = difference(made(authorization="hunter2", tenant="a"), made(authorization="hunter3"))
    assert "-authorization: *** (before)" in text
    assert "+authorization: *** (after)" in text
    assert "-tenant: a" in text
    for word in (b"hunter2", b"hunter3"):
        assert hashlib.sha256(word).hexdigest()[:8] not in text


def test_a_credential_that_stays_shows_no_difference() -> None:
    same = difference(made(authorization="hunter2"), made(authorization="hunter2", tenant="b"))
    assert "+tenant: b" in same
    assert "authorization: *** (" not in same
