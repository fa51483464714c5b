"""On a topic the body is raw and the envelope always readable, whoever wrote it."""

from __future__ import annotations

import json
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.dlq import CaptureSettings
from holdfast.dlq.capture.fingerprint import ALGORITHM
from holdfast.dlq.letter import Class, ExceptionInfo, FailureStage, Frame, KnownFacts
from holdfast.dlq.store.export import from_json, to_json
from holdfast.dlq.store.rows import fingerprint_of
from holdfast.dlq.topic.foreign import imported, is_foreign
from holdfast.dlq.topic.topic import ENVELOPE, from_topic, packed, to_topic
from holdfast.errors import PoisonMessage
from holdfast.headers import Headers
from holdfast.message import Message
from tests.dead_letters import failed, letter


def test_a_letter_comes_back_from_its_topic() -> None:
    """Everything of the envelope, and the message byte for byte."""
    headers = Headers([("x", b"\xff"), ("x", "2"), ("none", None)])
    origin = CaptureSettings(service_version="1.4", git_sha="abc", tenant="x")
    sent = letter(payload=b"\x00\xff", headers=headers, origin=origin)
    carried = to_topic(sent)
    assert carried.topic == "orders.billing.dlq"
    assert carried.payload == b"\x00\xff"
    assert carried.key == b"k1"
    assert from_topic(carried) == sent


@settings(deadline=None, max_examples=60)
@given(st.integers(2048, 20_000), st.text(max_size=3000), st.integers(0, 9))
def test_whatever_the_limit_the_envelope_fits_and_can_be_read(
    most: int, text: str, depth: int
) -> None:
    """Truncation drops whole parts; who failed on what is never lost."""
    error: BaseException = failed(ValueError(text))
    for _ in range(depth):
        outer = KeyError(text[:500])
        outer.__cause__ = error
        error = outer
    sent = letter(error=error, origin=CaptureSettings(git_sha="s" * 64, host="h" * 255))
    assert len(packed(sent, most=most)) <= most
    read = from_topic(to_topic(sent, most=most))
    assert read.dlq_id == sent.dlq_id
    assert read.culprit.group == "billing"
    assert read.culprit.handler == "shop.bill"
    assert read.message == sent.message
    assert read.failure.root.type == sent.failure.root.type
    assert fingerprint_of(read.failure).value == fingerprint_of(sent.failure).value


@pytest.mark.parametrize("most", [2048, 4096, 8192, 16384])
def test_one_problem_stays_one_group_however_small_its_envelope(most: int) -> None:
    """Frames are left out for room; the fingerprint is that of all of them."""
    chain = tuple(
        ExceptionInfo(
            type=f"E{n}",
            text="x" * 400,
            frames=(Frame("shop", "bill", 1, True), *[Frame("lib" * 20, "call" * 10, 1)] * 40),
        )
        for n in range(3)
    )
    sent = letter()
    sent = msgspec.structs.replace(sent, failure=msgspec.structs.replace(sent.failure, chain=chain))
    read = from_topic(to_topic(sent, most=most))
    assert read.failure.chain != chain
    found = fingerprint_of(read.failure)
    assert (found.value, found.by) == (fingerprint_of(sent.failure).value, "stack")
    lied = msgspec.structs.replace(read.failure, known=KnownFacts("../..", "me", ("h",), ALGORITHM))
    assert fingerprint_of(lied).by == "message"


def test_an_envelope_of_a_newer_version_is_kept_and_flagged() -> None:
    """It is neither dropped nor half-read, and goes on unchanged."""
    newer = {"schema_version": 7, "dlq_id": "7a", "failure": {"stage": "teleport"}, "more": [1]}
    message = to_topic(letter())
    pairs = [p for p in message.headers if p[0] != ENVELOPE]
    message = message.with_(
        headers=Headers.received([*pairs, (ENVELOPE, json.dumps(newer).encode())])
    )
    read = from_topic(message)
    assert read.schema_version == 7
    assert read.dlq_id == "7a"
    assert read.newer == newer
    assert read.failure.kind is Class.UNKNOWN
    assert "upgrade" in read.failure.root.text
    assert not read.is_replayable
    assert msgspec.json.decode(packed(read)) == newer


@pytest.mark.parametrize("envelope", [b"", b"{", b"[]", b'{"schema_version": "x"}', b"\xff" * 99])
def test_an_unreadable_envelope_is_poison_with_a_reason(envelope: bytes) -> None:
    """The collector stores it as a problem of its own."""
    message = Message.new("orders.billing.dlq", b"", headers=Headers([(ENVELOPE, envelope)]))
    with pytest.raises(PoisonMessage, match="cannot be read"):
        from_topic(message)


def test_kafka_connect_headers_are_understood() -> None:
    """Coordinates, connector, stage and exception."""
    said = {
        "topic": "orders", "partition": "3", "offset": "42", "connector.name": "jdbc",
        "task.id": "0", "stage": "VALUE_CONVERTER",
        "exception.class.name": "org.apache.kafka.connect.errors.DataException",
        "exception.message": "bad \x1b[31m", "exception.stacktrace": "at x",
    }  # fmt: skip
    headers = Headers({f"__connect.errors.{k}": v for k, v in said.items()} | {"own": "1"})
    message = Message.new("orders-dlq", b"raw", headers=headers)
    assert is_foreign(message)
    read = imported(message)
    assert read.coordinates.topic == read.message.topic == "orders"
    assert (read.coordinates.lane, read.coordinates.position) == (3, 42)
    assert read.culprit.group == "connect-jdbc"
    assert (read.failure.stage, read.failure.kind) == (FailureStage.DESERIALIZE, Class.POISON)
    assert read.failure.root.type.endswith("DataException")
    assert "\x1b" not in read.failure.root.text
    assert [name for name, _ in read.message.headers] == ["own"]


def test_spring_headers_are_understood() -> None:
    """Binary numbers, the cause before the wrapper, the consumer group."""
    headers = Headers([
        ("kafka_dlt-original-topic", b"orders"),
        ("kafka_dlt-original-partition", struct.pack(">i", 3)),
        ("kafka_dlt-original-offset", struct.pack(">q", 42)),
        ("kafka_dlt-original-consumer-group", b"billing"),
        ("kafka_dlt-exception-fqcn", b"org.springframework.kafka.listener.ListenerException"),
        ("kafka_dlt-exception-cause-fqcn", b"java.net.SocketTimeoutException"),
        ("kafka_dlt-exception-message", b"timed out"),
    ])  # fmt: skip
    read = imported(Message.new("orders-dlt", b"raw", headers=headers))
    assert (read.coordinates.lane, read.coordinates.position) == (3, 42)
    assert read.culprit.group == "billing"
    assert read.failure.root.type == "java.net.SocketTimeoutException"
    assert len(read.failure.chain) == 2
    assert read.failure.kind is Class.TIMEOUT


def test_a_message_that_spring_retried_on_topics_comes_from_the_first_of_them() -> None:
    """Spring adds a value for each topic that it failed on; the latest error is the error."""
    pairs = []
    for topic, offset, at, error in (("orders", 42, 1_700_000_000_000, "first"),
                                     ("orders-retry-0", 7, 1_700_000_009_000, "last")):  # fmt: skip
        pairs += [
            ("kafka_dlt-original-topic", topic.encode()),
            ("kafka_dlt-original-offset", struct.pack(">q", offset)),
            ("kafka_dlt-original-timestamp", struct.pack(">q", at)),
            ("kafka_dlt-exception-message", error.encode()),
        ]
    headers = Headers.received([*pairs, ("kafka_dlt-original-partition", b"12")])
    message = Message.new("orders-dlt", b"raw", headers=headers, source="topic:orders-dlt")
    read = imported(message, stored_at=1_700_000_010.0)
    assert (read.message.topic, read.coordinates.position) == ("orders", 42)
    assert read.coordinates.lane == 12
    assert read.failure.root.text == "last"
    assert read.message.time.timestamp() == 1_700_000_000
    assert read.history.last_failed_at == 1_700_000_010


def test_an_event_that_another_tool_puts_aside_twice_has_failed_twice() -> None:
    """Its own time stays the same; the broker knows when each letter came."""
    headers = Headers({"__connect.errors.topic": "orders"})
    event = Message.new("dlq", b"raw", headers=headers)
    first, second = (imported(event, stored_at=at) for at in (10.0, 20.0))
    assert first.dlq_id == second.dlq_id
    assert first.history.failures[0].id != second.history.failures[0].id
    assert imported(event, stored_at=10.0) == first


def test_headers_of_kafkas_own_dead_letters_are_understood() -> None:
    """KIP-1191: share groups."""
    said = {"topic": "orders", "partition": "3", "offset": "42", "group": "billing",
            "delivery.count": "5", "message": "rejected"}  # fmt: skip
    headers = Headers({f"__dlq.errors.{k}": v for k, v in said.items()})
    read = imported(Message.new("dlq", b"raw", headers=headers))
    assert read.culprit.group == "billing"
    assert read.history.attempts == 5
    assert read.failure.root.text == "rejected"


def test_a_foreign_letter_has_the_identity_of_its_coordinates() -> None:
    """Importing the same dead letter twice collapses; another offset is another letter."""

    def read(offset: str, id_: str) -> str:
        headers = Headers({"__connect.errors.topic": "orders", "__connect.errors.partition": "0",
                           "__connect.errors.offset": offset})  # fmt: skip
        message = Message.new("dlq", b"raw", headers=headers, source="topic:dlq", ids=lambda: id_)
        return imported(message).dlq_id

    assert read("1", "a") == read("1", "b") != read("2", "a")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["topic", "partition", "offset", "stage", "connector.name"]),
                       st.binary(max_size=30)))  # fmt: skip
def test_nonsense_in_foreign_headers_does_not_stop_the_import(said: dict[str, bytes]) -> None:
    """Whatever stands there, a letter comes out."""
    pairs = [(f"{p}{k}", v) for p in ("__connect.errors.", "kafka_dlt-original-")
             for k, v in {"x": b"", **said}.items()]  # fmt: skip
    assert imported(Message.new("dlq", b"raw", headers=Headers.received(pairs))).dlq_id


def test_an_exported_letter_comes_back_whole() -> None:
    """Also bytes that are no text; what is no export is refused with a reason."""
    headers = Headers([("x", b"\xff"), ("x", "2"), ("none", None)])
    sent = letter(payload=b"\x00\xff", headers=headers)
    assert from_json(to_json(sent)) == sent
    assert b"\n" not in to_json(sent)
    for line in (b"", b"{}", b"[1]", to_json(sent).replace(b'"payload":"', b'"payload":"!')):
        with pytest.raises(PoisonMessage, match="not an exported"):
            from_json(line)


@pytest.mark.parametrize("names", ["items", "fields"])
def test_sealed_fields_are_never_taken_for_plain_ones(names: str) -> None:
    """However small the envelope must be: patterns stand for many paths, or it is not replayed."""
    many = 1200 if names == "items" else 300
    sealed = tuple(
        f"items.{n}.pin" if names == "items" else f"pins.{'x' * 9}{n}" for n in range(many)
    )
    made = letter()
    kept = msgspec.structs.replace(made.governance, subject="c-1", sealed=sealed, tenant="t")
    made = msgspec.structs.replace(made, governance=kept)
    back = from_topic(to_topic(made, most=2048))
    assert back.governance.subject == "c-1"
    if names == "items":
        assert back.governance.sealed == ("items.*.pin",)
        assert back.is_replayable
    else:
        assert not back.is_replayable
