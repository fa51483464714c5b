"""Capture takes any failure apart, however hostile, and keeps the message whole."""

from __future__ import annotations

import json

import pytest

from holdfast.dlq import CaptureSettings, Redaction, capture
from holdfast.dlq.letter import Class, DeadLetter, FailureStage
from holdfast.dlq.store.rows import fingerprint_of, letter_of, row_of
from holdfast.errors import ConfigurationError, DecodeFailed, DependencyDown
from holdfast.headers import Headers
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.scrubbing import MOST_TEXT, scrubbed, text_of
from holdfast.testing import VirtualClock
from tests.dead_letters import failed


def caught(error: BaseException, message: Message | None = None, **more: object) -> DeadLetter:
    """Return *error* captured."""
    if message is None:
        message = Message.new("orders", b'{"n": 1}', key="k", ids=lambda: "id-1")
    options = {"group": "billing", "handler": "shop.bill", "clock": VirtualClock(), **more}
    return capture(message, error, **options)  # type: ignore[arg-type]


def test_the_chain_has_the_root_first_with_structured_frames() -> None:
    """Cause and wrapper, each with module, function and line, own code marked."""

    def inner() -> None:
        raise KeyError("total")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise RuntimeError("no bill") from error

    with pytest.raises(RuntimeError) as info:
        outer()
    letter = caught(info.value)
    root, top = letter.failure.chain
    assert (root.type, top.type) == ("KeyError", "RuntimeError")
    last = root.frames[-1]
    assert last.module == __name__
    assert last.function.endswith("inner")
    assert last.in_app
    assert last.line > 0
    assert fingerprint_of(letter.failure).by == "stack"


def test_an_error_whose_attributes_are_broken_is_a_failure_like_any_other() -> None:
    """The handler's own classes may raise when they are looked at."""

    class Odd(Exception):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"no {name}, and not kind about it")

    assert caught(Odd("bad")).failure.root.text == "bad"


def test_the_same_message_is_the_same_letter_and_other_content_is_not() -> None:
    """Identity: group, handler, message id and content; never where or when it failed."""
    message = Message.new("orders", b"a", ids=lambda: "one")
    elsewhere = Delivery(lane=Lane("orders", 3), position=17, key=None, body=b"a")
    first = caught(ValueError(), message)
    assert caught(KeyError(), message, delivery=elsewhere).dlq_id == first.dlq_id
    assert caught(ValueError(), message.with_(payload=b"b")).dlq_id != first.dlq_id
    assert caught(ValueError(), message.with_(payload=None)).dlq_id != first.dlq_id
    assert caught(ValueError(), message, group="other").dlq_id != first.dlq_id
    assert caught(ValueError(), message, handler="other").dlq_id != first.dlq_id


def test_a_replayed_copy_that_fails_is_the_same_letter() -> None:
    """The marks of the replay become lineage, not content."""
    message = Message.new("orders", b"a", ids=lambda: "one")
    marks = {"x-replay-group": "billing", "x-replay-plan": "p1", "x-replay-topic": "orders",
             "x-replay-dlq-id": "d"}  # fmt: skip
    copy = message.with_(topic="orders.billing.replay", headers=Headers(marks))
    again = caught(ValueError(), copy)
    assert again.dlq_id == caught(ValueError(), message).dlq_id
    assert again.lineage.replay_id == "p1"
    assert again.message.topic == "orders"
    assert len(again.message.headers) == 0


class Broken(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


def cyclic() -> BaseException:
    """Return two errors that cause each other."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def long_chain() -> BaseException:
    """Return ten thousand causes."""
    error: BaseException = ValueError("root")
    for number in range(10_000):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    return error


def deep_groups() -> BaseException:
    """Return groups in groups."""
    error: Exception = KeyError("leaf")
    for _ in range(200):
        error = ExceptionGroup("more", [error, ValueError("x")])
    return error


HOSTILE = [
    ValueError("x" * 10_000_000),
    ValueError("\x1b[2J\x1b]0;owned\x07\x00\r\n\u202e\ud800"),
    ValueError(("a" * 50 + "!") * 10_000),
    ValueError("http://" + "a:" * 100_000),
    ValueError("password=" * 100_000),
    ValueError(b"\xff\xfe"),
    Broken(),
    cyclic(),
    long_chain(),
    deep_groups(),
    type("E" * 1000, (Exception,), {})("long name"),
]


@pytest.mark.parametrize("error", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_errors_become_bounded_letters(error: BaseException) -> None:
    """Nothing fails, nothing is large, nothing moves a terminal, and it can be stored."""
    letter = caught(failed(error))
    text = letter.failure.root.text + letter.failure.trace
    assert len(text) < 12_000
    assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
    text.encode()
    row = row_of(letter, fingerprint_of(letter.failure), now=0.0)
    assert len(row["envelope"]) < 200_000
    assert letter_of({**row, "seq": 1}).failure == letter.failure


def test_a_deep_recursion_is_cut_and_grouped() -> None:
    """The innermost frames are kept, and depth does not part a group."""

    def down(n: int) -> None:
        if n == 0:
            raise ValueError("deep")
        down(n - 1)

    prints = []
    for depth in (30, 300):
        with pytest.raises(ValueError, match="deep") as info:
            down(depth)
        letter = caught(info.value)
        assert len(letter.failure.root.frames) <= 50
        prints.append(fingerprint_of(letter.failure).text.split(">")[-1])
    assert prints[0] == prints[1]


def test_members_of_a_group_are_unwrapped() -> None:
    """A task group shows its causes, not itself."""
    error = ExceptionGroup("tasks", [ValueError("b"), ExceptionGroup("in", [KeyError("a")])])
    letter = caught(error)
    assert letter.failure.root.type == "KeyError"
    assert [other.type for other in letter.failure.also] == ["ValueError"]


def test_secrets_in_texts_are_taken_out() -> None:
    """URLs with passwords, tokens, keys."""
    said = (
        "connect postgresql://bob:hunter2@db/x failed, api_key=abc123, password: 'top secret', "
        'Authorization: Bearer abcdefgh12345678, token="t0k3n", order=17'
    )
    letter = caught(ValueError(said))
    text = letter.failure.root.text
    for secret in ("hunter2", "abc123", "top secret", "abcdefgh12345678", "t0k3n"):
        assert secret not in text
    assert "order=17" in text
    assert secret not in letter.history.failures[0].error


def test_fields_are_redacted_by_path_and_the_message_is_then_not_replayable() -> None:
    """The values are gone, the rest is there, and identity does not depend on them."""
    body = b'{"card": {"number": "4111", "name": "A"}, "items": [{"pin": 1}, {"pin": 2}], "n": 1}'
    message = Message.new("orders", body, ids=lambda: "one")
    origin = CaptureSettings(redaction=Redaction(paths=("card.number", "items.*.pin", "absent")))
    letter = caught(ValueError(), message, origin=origin)
    assert b"4111" not in (letter.message.payload or b"")
    assert b'"name": "A"}, "items"' in (letter.message.payload or b"")
    assert letter.governance.redacted == ("card.number", "items.0.pin", "items.1.pin")
    assert not letter.is_replayable
    other = message.with_(payload=body.replace(b"4111", b"4242"))
    assert letter.dlq_id == caught(ValueError(), other, origin=origin).dlq_id


def test_without_a_match_the_bytes_are_the_very_same() -> None:
    """Redaction does not reformat what it does not touch."""
    origin = CaptureSettings(redaction=Redaction(paths=("card",)))
    for body in (b'{ "n" : 1 }', b"", b"[1]", b'"card"', None):
        message = Message.new("orders", body)
        assert caught(ValueError(), message, origin=origin).message.payload == body


@pytest.mark.parametrize("body", [b"\xff\xfe4111", b'{"card": "4111', b"[" * 5_000 + b"4111"])
def test_a_payload_whose_fields_cannot_be_told_apart_is_removed_whole(body: bytes) -> None:
    """With what the error says of it; without fields to redact nothing is touched."""
    message = Message.new("orders", body)
    letter = caught(
        ValueError("at 4111"), message, origin=CaptureSettings(redaction=Redaction(paths=("card",)))
    )
    assert letter.governance.redacted == ("$",)
    assert "4111" not in repr(letter)
    assert caught(ValueError("at 4111"), message).message.payload == body


def test_tenant_entity_and_subject_come_from_headers_or_fields() -> None:
    """Bounded and without control characters."""
    origin = CaptureSettings(tenant="tenant", entity="$.order.id", subject="$.none")
    message = Message.new("orders", b'{"order": {"id": 7}}', headers={"tenant": "a\x1b" * 500})
    governance = caught(ValueError(), message, origin=origin).governance
    assert governance.entity_ref == "7"
    assert governance.subject is None
    assert governance.tenant is not None
    assert len(governance.tenant) <= 255
    assert "\x1b" not in governance.tenant


@pytest.mark.parametrize(
    ("error", "kind", "stage"),
    [
        (DecodeFailed("bad", "byte 3"), Class.POISON, FailureStage.DESERIALIZE),
        (DecodeFailed("bad", "$.total"), Class.POISON, FailureStage.VALIDATE),
        (TimeoutError(), Class.TIMEOUT, FailureStage.HANDLE),
        (ConnectionError(), Class.TRANSIENT, FailureStage.HANDLE),
        (DependencyDown("x"), Class.DEPENDENCY, FailureStage.HANDLE),
        (ValueError(), Class.UNKNOWN, FailureStage.HANDLE),
        (NameError(), Class.POISON, FailureStage.HANDLE),
    ],
)
def test_class_and_stage_follow_from_the_error(
    error: BaseException, kind: Class, stage: FailureStage
) -> None:
    """Triage starts from these."""
    failure = caught(error).failure
    assert (failure.kind, failure.stage) == (kind, stage)


def test_an_error_may_say_its_own_fingerprint() -> None:
    """The program knows best what belongs together."""
    error = ValueError("x")
    error.__holdfast_fingerprint__ = "card-declined"  # type: ignore[attr-defined]
    assert fingerprint_of(caught(error).failure).by == "explicit"


@pytest.mark.parametrize("path", ["", ".", "a..b", "a.", "a\\"])
def test_a_bad_path_is_refused(path: str) -> None:
    """When the redaction is made, not when the first message fails."""
    with pytest.raises(ConfigurationError, match="parted by dots"):
        Redaction(paths=(path,))


def test_scrubbing_hostile_text_ends() -> None:
    """Repeats are bounded and the text is cut first."""
    for bomb in ("token" * 200_000, "a=" * 500_000, "eyJ" * 300_000, "bearer " * 100_000):
        assert len(scrubbed(bomb)) < 20_000


def test_an_expression_never_sees_more_than_the_first_characters() -> None:
    """The text is cut before it is redacted: its length is the sender's choice."""
    seen: list[int] = []

    def redact(text: str) -> str:
        seen.append(len(text))
        return text

    kept = text_of(ValueError("x" * 10_000_000), redact)
    assert seen == [MOST_TEXT * 2]
    assert len(kept) == MOST_TEXT + 1


def test_what_is_kept_out_of_the_payload_is_kept_out_of_the_text() -> None:
    """An error quotes the value it failed on; it is gone from text, trace, history and title."""
    body = b'{"name": "Ada Lovelace", "card": {"pan": 4111222233334444}, "n": 1}'
    made = Message.new("orders", body)
    origin = CaptureSettings(redaction=Redaction(paths=("name", "card")))
    error = ValueError("cannot bill Ada Lovelace with 4111222233334444, step 1")
    kept = capture(made, error, group="g", handler="h", origin=origin)
    said = repr(kept)
    assert "Lovelace" not in said
    assert "4111222233334444" not in said
    assert kept.failure.root.text == "cannot bill *** with ***, step 1"


def test_a_value_is_taken_out_of_the_text_in_every_form() -> None:
    """As Python, JSON or bytes write it, cut short by whoever quotes it, and however long."""
    name, long = 'Jürgen "M" Müller', "s3cr" * 2_000
    made = Message.new("orders", json.dumps({"name": name, "long": long, "sum": 1.10}).encode())
    origin = CaptureSettings(redaction=Redaction(paths=("name", "long", "sum")))
    quotes = [name, repr(name), ascii(name), repr(made.payload), json.dumps(name), long, long[:50]]
    for quote in (*quotes, f"{long[:25]}...{long[-24:]}", "sum 1.1"):
        kept = caught(ValueError(f"bad: {quote} end"), made, origin=origin).failure.root.text
        assert kept.startswith("bad: ")
        for part in ("rgen", "ller", "s3crs3cr", "1.1"):
            assert part not in kept, (quote, kept)
