"""Kafka keeps the broker port's promises, through kafka-python and through confluent-kafka."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers.kafka import KafkaBroker
from holdfast.testing.conformance import BrokerConformance
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Kafka

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")


class KafkaConformance(BrokerConformance):
    """What both drivers share: a real server, and short sessions so that deaths show soon."""

    session = None
    settle_in = 15.0
    scheme = "kafka"

    @pytest.fixture
    def url(self, kafka: Kafka) -> str:
        return f"{self.scheme}://{kafka.address}"

    @pytest.fixture
    def broker(self, url: str, kafka: Kafka) -> Iterator[KafkaBroker]:
        self.server = kafka
        broker = KafkaBroker(BrokerUrl.parse(url), publish_within=1.0)
        yield broker
        broker.close()

    @contextmanager
    def break_publishing(self, broker: Any) -> Iterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()


class TestKafkaPython(KafkaConformance):
    source_settings = {"session_timeout_ms": 1500, "heartbeat_interval_ms": 100}  # noqa: RUF012


class TestConfluent(KafkaConformance):
    scheme = "kafka+confluent"
    source_settings = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 100}  # noqa: RUF012
