"""What a sink or broker can do beyond its port is declared, never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Message, MessageTooLarge
from holdfast.brokers import connect
from holdfast.ports import BrokerPowers, Caps, Ordering, Published, Settle, SinkPowers
from holdfast.stored_message import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.ports import Broker

CAPS = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.PARTITION, max_message=100)


class Plain:
    """A sink of somebody else's, with a method that only looks like a power."""

    caps = CAPS

    def __init__(self) -> None:
        self.taken: list[Message] = []

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        self.taken += messages
        return [Published() for _ in messages]

    def publish_within(self, *_: object) -> list[Published]:
        raise AssertionError("not declared")

    def close(self) -> None: ...


class Swift(Plain, SinkPowers):
    """A sink that declares what it can."""

    keeps_deadlines = True

    def publish_within(self, *given: Any) -> list[Published]:
        return self.publish(given[0])


def test_a_sink_that_declares_nothing_has_the_usual_powers() -> None:
    """It publishes without a deadline, and its limit is that of its caps."""
    sink = Plain()
    powers = SinkPowers.of(sink)
    powers.prepare()
    assert powers.publish_within([Message.new("orders", b"1")], 5.0) == [Published()]
    assert len(sink.taken) == 1
    assert not powers.keeps_deadlines
    assert powers.room(["orders"]) == 100


def test_a_sink_that_declares_its_powers_is_asked_itself() -> None:
    """Nothing stands between."""
    sink = Swift()
    assert SinkPowers.of(sink) is sink
    assert sink.keeps_deadlines


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_too_large_for_any_topic_is_known_beforehand(stored: bool) -> None:
    """Payload, key and, where they are known, headers count."""
    powers = SinkPowers.of(Plain())
    made = Message.new("orders", b"x" * 80, key="12345")
    message = made
    if stored:
        message = StoredMessage(
            id="1", topic="orders", type="t", source="s", time=made.time, payload=made.payload,
            key=made.key, packed="h" * 20,
        )  # fmt: skip
    refused = powers.refusal(message)
    assert isinstance(refused, MessageTooLarge) is stored


class Simple:
    """A broker of somebody else's."""

    name = "simple"
    caps = CAPS

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        self.made.append((topic, partitions))

    def sink(self, **_: object) -> Plain:
        return Plain()


def test_a_broker_that_declares_nothing_makes_plain_topics() -> None:
    """It does not tell its topics, and abandons nobody."""
    broker: Any = Simple()
    powers = BrokerPowers.of(broker)
    powers.create_larger("orders.dlq", like="orders", more=1000)
    assert broker.made == [("orders.dlq", 1)]
    assert isinstance(powers.larger_sink(1000), Plain)
    assert powers.default_partitions == 1
    assert powers.topics() is None
    assert powers.abandon(broker) is False


def test_the_embedded_broker_tells_its_topics_and_its_usual_lanes() -> None:
    """As its settings say."""
    broker: Broker = connect("memory:?partitions=3")
    broker.create_topic("orders", partitions=2)
    powers = BrokerPowers.of(broker)
    assert powers.topics() == {"orders": 2}
    assert powers.default_partitions == 3
