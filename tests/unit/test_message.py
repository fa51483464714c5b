"""Messages: frozen facts that know what caused them."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from holdfast.errors import InvalidMessage
from holdfast.headers import REPLAY_GROUP, REPLAY_MARKS, Headers
from holdfast.message import Message, carry, current_message, handling, utc

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def cause(**fields: Any) -> Message:
    return Message.new("orders", b"{}", ids=lambda: "cause", now=lambda: NOW).with_(**fields)


def test_a_message_cannot_be_changed() -> None:
    """Layers may keep one without fear of each other."""
    message = Message.new("orders", b"{}")
    with pytest.raises(AttributeError):
        message.topic = "other"  # type: ignore[misc]
    assert message.with_(topic="other").topic == "other"
    assert message.topic == "orders"


def test_messages_are_values() -> None:
    """Equal fields are equal messages, usable in sets."""
    assert len({cause(), cause()}) == 1


def test_a_new_message_starts_a_correlation_of_its_own() -> None:
    """Outside of any handler there is no cause."""
    message = Message.new("orders", b"{}", ids=lambda: "m-1", now=lambda: NOW)
    assert (message.id, message.time) == ("m-1", NOW)
    assert (message.correlation_id, message.causation_id) == ("m-1", None)


def test_a_message_made_while_handling_names_its_cause() -> None:
    """Correlation and trace are inherited, and the handled message is the cause."""
    with handling(cause(correlation_id="flow", traceparent="00-aa-bb-01")) as handled:
        made = Message.new("bills", b"{}")
    assert (made.correlation_id, made.causation_id) == ("flow", handled.id)
    assert made.traceparent == "00-aa-bb-01"
    assert current_message() is None


@pytest.mark.parametrize("name", ["ce_tracestate", "ce-tracestate", "tracestate"])
def test_a_message_made_while_handling_keeps_the_state_of_the_trace(name: str) -> None:
    """Whoever sent the cause, and however it named the header."""
    with handling(cause(traceparent="00-aa-bb-01", headers=Headers({name: "vendor=1"}))):
        made = Message.new("bills", b"{}", headers={"ce_tracestate": "copied=0"})
    assert (made.traceparent, made.tracestate) == ("00-aa-bb-01", "vendor=1")


def test_a_cause_without_correlation_becomes_the_correlation() -> None:
    """A foreign message starts the flow that it sets off."""
    with handling(cause(correlation_id=None)):
        assert Message.new("bills", b"{}").correlation_id == "cause"


def test_handling_ends_with_the_innermost_first() -> None:
    """Nested handling restores the outer message, also after an error."""
    with handling(cause(id="outer")) as outer:
        with pytest.raises(RuntimeError), handling(cause(id="inner")):
            raise RuntimeError
        assert current_message() is outer


def test_a_thread_inherits_the_cause_only_when_carried() -> None:
    """Threads start with a clean context; carry() takes the message along."""
    made: dict[str, Message] = {}
    together = threading.Barrier(3, timeout=60)

    def make(name: str) -> None:
        together.wait()
        made[name] = Message.new("bills", b"{}")

    with handling(cause()):
        carried = carry(make)
        threads = [
            threading.Thread(target=carried, args=("carried",)),
            threading.Thread(target=carried, args=("carried too",)),
            threading.Thread(target=make, args=("bare",)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made["carried"].causation_id == made["carried too"].causation_id == "cause"
    assert made["bare"].causation_id is None


def test_asyncio_tasks_inherit_the_cause_and_do_not_mix() -> None:
    """Each task sees the message that it handles, whatever runs between."""

    async def handle(name: str, ready: asyncio.Barrier) -> Message:
        with handling(cause(id=name)):
            await ready.wait()
            return await asyncio.create_task(make())

    async def make() -> Message:
        return Message.new("bills", b"{}")

    async def run() -> list[Message]:
        ready = asyncio.Barrier(2)
        return await asyncio.gather(handle("a", ready), handle("b", ready))

    assert [made.causation_id for made in asyncio.run(run())] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"topic": ""}, "topic is empty: name the topic"),
        ({"id": ""}, "id is empty: leave it out"),
        ({"time": NOW.replace(tzinfo=None)}, "is naive: attach a timezone"),
    ],
)
def test_nonsense_is_refused_with_the_fix(fields: dict[str, Any], fix: str) -> None:
    """A malformed message fails where it is made, and so does a malformed copy."""
    sound: dict[str, Any] = {"id": "m", "topic": "orders", "payload": b"", "time": NOW}
    with pytest.raises(InvalidMessage, match=fix):
        Message(**sound | fields)
    with pytest.raises(InvalidMessage, match=fix):
        Message(**sound).with_(**fields)


@pytest.mark.parametrize("payload", ["text", {"a": 1}, 7, bytearray(b"x")])
def test_a_payload_must_be_bytes(payload: Any) -> None:
    """Encoding is the codec's work, and the error says so."""
    with pytest.raises(InvalidMessage, match=f"a {type(payload).__name__}: encode it to bytes"):
        Message.new("orders", payload)


@pytest.mark.parametrize("key", [7, 7.0, ("a",)])
def test_a_key_must_be_text_or_bytes(key: Any) -> None:
    """A number as key would be written differently by each broker."""
    with pytest.raises(InvalidMessage, match=r"pass str or bytes, e.g. str\(key\)"):
        Message.new("orders", b"", key=key)


def test_a_text_key_is_stored_as_utf8() -> None:
    """Brokers hash bytes."""
    assert Message.new("orders", b"", key="é").key == "é".encode()
    assert Message.new("orders", b"", key=b"\xff").key_text == "\ufffd"
    assert Message.new("orders", b"").key_text is None


def test_a_tombstone_is_not_an_empty_payload() -> None:
    """None deletes, empty bytes do not."""
    assert Message.new("orders", None) != Message.new("orders", b"")
    assert Message.new("orders", None).payload is None


def test_the_size_counts_payload_key_and_headers() -> None:
    """Limits of brokers are on the whole."""
    message = Message.new("orders", b"123", key="45", headers={"a": "67", "b": None})
    assert message.size == 3 + 2 + 3 + 1


def test_a_replayed_message_says_so() -> None:
    """Handlers suppress effects by it."""
    assert not cause().is_replay
    marks = dict.fromkeys(REPLAY_MARKS, "x") | {
        REPLAY_GROUP: "billing",
        "x-replay-topic": "orders",
    }
    assert cause(headers=Headers(marks)).is_replay
    assert cause(headers=Headers(marks), topic="orders.billing.replay").is_replay
    assert not cause(headers=Headers(marks), topic="clicks").is_replay
    assert not cause(headers=Headers({REPLAY_GROUP: "billing"})).is_replay


def test_times_are_compared_in_utc() -> None:
    """A naive time is refused, an offset is converted."""
    east = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert utc(east).isoformat() == "2026-01-01T00:00:00+00:00"
    with pytest.raises(InvalidMessage, match="naive"):
        utc(NOW.replace(tzinfo=None))
