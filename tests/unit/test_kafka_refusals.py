"""What follows from a refused message for those behind it: decisions only."""

from __future__ import annotations

import pytest

from holdfast.brokers.kafka.errors import check_outage, is_open, try_alone
from holdfast.errors import BrokerDown, ConfigurationError, InvalidMessage, Transient
from holdfast.message import Message
from holdfast.ports import Published

BAD = Published(error=InvalidMessage("bad"))
DOWN = Published(error=BrokerDown("down"))


def tried(
    messages: list[Message], answers: dict[bytes, Published]
) -> tuple[list[bytes], list[Published]]:
    """Try all of *messages* alone; return what was sent, and the results."""
    sent: list[bytes] = []
    results = [DOWN] * len(messages)

    def send(message: Message) -> Published:
        sent.append(message.payload or b"")
        return answers.get(sent[-1], Published())

    try_alone(messages, range(len(messages)), results, send)
    return sent, results


def of(*bodies: str, key: str | None = "k", topic: str = "t") -> list[Message]:
    return [Message.new(topic, body.encode(), key=key) for body in bodies]


def test_nothing_overtakes_a_refused_message_of_its_key() -> None:
    """Later ones of the key come back to be published again; other keys are stored."""
    sent, results = tried([*of("1", "2", "3"), *of("o", key="other")], {b"2": BAD})
    assert sent == [b"1", b"2", b"o"]
    assert [type(result.error) for result in results] == [
        type(None), InvalidMessage, Transient, type(None),
    ]  # fmt: skip


def test_messages_without_a_key_wait_for_nobody() -> None:
    """Each is tried, whatever became of the others."""
    sent, results = tried(of("1", "2", "3", key=None), {b"1": BAD})
    assert sent == [b"1", b"2", b"3"]
    assert [result.error is None for result in results] == [False, True, True]


def test_a_topic_that_takes_nothing_is_asked_once() -> None:
    """Hundreds of messages to it are refused without a try; other topics go on."""
    shut = Published(error=ConfigurationError("no permission"))
    sent, results = tried([*of("1", "2", key=None), *of("o", topic="open")], {b"1": shut})
    assert sent == [b"1", b"o"]
    assert results == [shut, shut, Published()]


def test_an_outage_ends_the_tries_and_leaves_what_was_told() -> None:
    """What is known stays known; the rest is neither stored nor refused."""
    sent, results = tried(of("1", "2", "3", "4", key=None), {b"2": BAD, b"3": DOWN})
    assert sent == [b"1", b"2", b"3"]
    assert results[:3] == [Published(), BAD, DOWN]
    assert is_open(results[3])


def test_an_outage_is_raised_only_where_nobody_is_to_blame() -> None:
    """A refused message explains the failure of its neighbours."""
    check_outage([Published(), BAD, DOWN])
    with pytest.raises(BrokerDown):
        check_outage([Published(), DOWN])
