"""What librdkafka does not report: a scripted client in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from holdfast.brokers.kafka.confluent import producer
from holdfast.brokers.kafka.confluent.producer import ConfluentProducer
from holdfast.brokers.kafka.settings import KafkaSettings
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import InvalidMessage
from holdfast.message import Message
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    import pytest


class Librdkafka:
    """Refuses *bad*; without order to lose it stores the rest, else it fails whole.

    Failing, it says so by an exception, and that costs the report of *unheard*.
    """

    stored: list[bytes]
    bad, unheard = b"bad", b"unheard"

    def __init__(self, configs: dict[str, Any]) -> None:
        self._plain = configs.get("enable.idempotence") is False
        self._terse = bool(configs.get("delivery.report.only.error"))
        self._queue: list[tuple[bytes, Any]] = []
        self._broken = False

    def produce(self, _topic: str, body: bytes, _key: bytes, _lane: int, report: Any,
                *_: Any) -> None:  # fmt: skip
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
                    report(None, None)
        if fails and not self._plain:
            raise KafkaException(KafkaError(KafkaError._GAPLESS_GUARANTEE))
        return 0

    def purge(self) -> None: ...


def published(monkeypatch: pytest.MonkeyPatch, *bodies: bytes) -> list[bool]:
    """Publish *bodies*, each with a key of its own; return which are said to be stored."""
    monkeypatch.setattr(Librdkafka, "stored", [], raising=False)
    monkeypatch.setattr(producer, "Producer", Librdkafka)
    settings = KafkaSettings.read(BrokerUrl.parse("kafka+confluent://broker:9092"), {})
    publishing = ConfluentProducer({}, settings, SYSTEM_CLOCK)
    messages = [Message.new("t", body, key=body) for body in bodies]
    results = publishing.publish(messages, SYSTEM_CLOCK.monotonic() + 60, located=False)
    assert all(isinstance(r.error, InvalidMessage | None) for r in results)
    return [result.error is None for result in results]


def test_what_is_not_reported_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing failed; each is sent once."""
    assert published(monkeypatch, b"1", b"2") == [True, True]
    assert Librdkafka.stored == [b"1", b"2"]


def test_a_lost_report_of_a_failure_is_not_taken_for_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal may cost a report; whatever was not reported is sent again then."""
    bodies = (b"1", Librdkafka.bad, Librdkafka.unheard)
    assert published(monkeypatch, *bodies) == [True, False, True]
    assert Librdkafka.stored == [b"1", Librdkafka.unheard]
