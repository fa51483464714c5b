"""What librdkafka does not report: a scripted client in its place."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from holdfast.brokers.kafka.broker import KafkaSettings
from holdfast.brokers.kafka.confluent import producer
from holdfast.brokers.kafka.confluent.driver import ConfluentDriver
from holdfast.brokers.kafka.confluent.producer import ConfluentProducer
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import InvalidMessage
from holdfast.message import Message
from holdfast.ports import Lane, Published
from holdfast.urls import BrokerUrl


class Record:
    """What a report of success tells."""

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return 14


class Librdkafka:
    """Refuses *bad*; without order to lose it stores the rest, else it fails whole.

    Failing, it says so by an exception, and that costs the report of *unheard*.
    """

    made: int
    stored: list[bytes]
    bad, unheard = b"bad", b"unheard"

    def __init__(self, configs: dict[str, Any]) -> None:
        Librdkafka.made += 1
        self._plain = configs.get("enable.idempotence") is False
        self._terse = bool(configs.get("delivery.report.only.error"))
        self._queue: list[tuple[bytes, Any]] = []
        self._room = int(configs.get("queue.buffering.max.messages", 100_000))

    def produce(self, _topic: str, body: bytes, _key: bytes, _lane: int = -1, report: Any = None,
                *_: Any, on_delivery: Any = None, headers: Any = None) -> None:  # fmt: skip
        del headers
        report = report or on_delivery
        if len(self._queue) >= self._room:
            raise BufferError
        self._queue.append((body, report))

    def flush(self, _seconds: float) -> int:
        queue, self._queue = self._queue, []
        fails = any(body == self.bad for body, _ in queue)
        for body, report in queue:
            if body == self.bad or (fails and not self._plain):
                if body != self.unheard:
                    report(KafkaError(KafkaError.INVALID_RECORD), None)
            else:
                self.stored.append(body)
                if not self._terse:
                    report(None, Record())
        if fails and not self._plain:
            raise KafkaException(KafkaError(KafkaError._GAPLESS_GUARANTEE))
        return 0

    def purge(self) -> None: ...


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> ConfluentProducer:
    """Return a producer on the scripted client."""
    monkeypatch.setattr(Librdkafka, "made", 0, raising=False)
    monkeypatch.setattr(Librdkafka, "stored", [], raising=False)
    monkeypatch.setattr(producer, "Producer", Librdkafka)
    settings = KafkaSettings.read(BrokerUrl.parse("kafka+confluent://broker:9092"), {})
    return ConfluentProducer({}, settings, SYSTEM_CLOCK)


def publish(publishing: ConfluentProducer, *bodies: bytes, located: bool) -> list[Published]:
    """Publish *bodies*, each with a key of its own."""
    messages = [Message.new("t", body, key=body) for body in bodies]
    return publishing.publish(messages, SYSTEM_CLOCK.monotonic() + 60, located=located)


def test_what_is_not_reported_is_stored(publishing: ConfluentProducer) -> None:
    """Where nothing failed; each is sent once."""
    results = publish(publishing, b"1", b"2", located=False)
    assert [result.error for result in results] == [None, None]
    assert Librdkafka.stored == [b"1", b"2"]


def test_a_lost_report_of_a_failure_is_not_taken_for_success(
    publishing: ConfluentProducer,
) -> None:
    """A refusal may cost a report; whatever was not reported is sent again then."""
    bodies = (b"1", Librdkafka.bad, Librdkafka.unheard)
    results = publish(publishing, *bodies, located=False)
    assert [type(r.error) for r in results] == [type(None), InvalidMessage, type(None)]
    assert Librdkafka.stored == [b"1", Librdkafka.unheard]


def test_who_asks_where_a_message_is_stored_is_told(publishing: ConfluentProducer) -> None:
    """Also after a publish that did not ask."""
    publish(publishing, b"1", located=False)
    assert publish(publishing, b"2", located=True) == [Published(None, Lane("t", 3), 14)]


def test_a_prepared_producer_needs_no_new_client(publishing: ConfluentProducer) -> None:
    """The first message of a client takes long; a relay's has its time before."""
    publishing.prepare(located=False)
    before = Librdkafka.made
    for _ in range(2):
        publish(publishing, b"1", located=False)
    assert Librdkafka.made == before


def test_a_queue_that_is_full_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it to linger: a small queue of the user's own would be slow."""
    monkeypatch.setattr(Librdkafka, "made", 0, raising=False)
    monkeypatch.setattr(Librdkafka, "stored", [], raising=False)
    monkeypatch.setattr(producer, "Producer", Librdkafka)
    settings = KafkaSettings.read(BrokerUrl.parse("kafka+confluent://broker:9092"), {})
    small = ConfluentProducer({"queue.buffering.max.messages": 2}, settings, SYSTEM_CLOCK)
    results = publish(small, b"1", b"2", b"3", b"4", b"5", located=False)
    assert not any(result.error for result in results)
    assert Librdkafka.stored == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("given", "lingers"),
    [({}, 500), ({"linger.ms": 3}, 3), ({"message.timeout.ms": 100}, None)],
)
def test_a_batch_leaves_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], lingers: int | None
) -> None:
    """Not message by message, which takes several times the CPU; the user's settings win."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(producer, "Producer", made.append)
    settings = KafkaSettings.read(BrokerUrl.parse("kafka+confluent://broker:9092"), {})
    ConfluentDriver(settings, SYSTEM_CLOCK).producer(given, None)
    assert [configs.get("linger.ms") for configs in made] == [lingers]
