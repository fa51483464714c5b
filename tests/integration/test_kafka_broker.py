"""Kafka keeps the broker port's promises, through kafka-python and through confluent-kafka."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers.kafka import KafkaBroker
from holdfast.testing.conformance import BrokerConformance
from holdfast.urls import BrokerUrl
from tests.kafka.members import QUICK, SILENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.servers import Kafka


class KafkaConformance(BrokerConformance):
    """What both drivers share: a real server, and short sessions so that deaths show soon."""

    scheme = "kafka"
    session = SILENCE
    settle_in = 30.0

    @pytest.fixture
    def url(self, kafka: Kafka) -> str:
        return f"{self.scheme}://{kafka.address}"

    @pytest.fixture
    def broker(self, url: str, kafka: Kafka) -> Iterator[KafkaBroker]:
        self.server = kafka
        broker = KafkaBroker(BrokerUrl.parse(url))
        yield broker
        broker.close()

    def break_publishing(self, broker: Any) -> AbstractContextManager[None]:
        """Stop the server; the sink that is made next gives up soon."""
        broker._settings = broker._driver._settings = replace(broker._settings, publish_within=1.0)
        return self._stopped()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        # A proxy would be passed by: the server tells clients its own address.
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()


class TestKafkaPython(KafkaConformance):
    source_settings = QUICK["kafka"]


class TestConfluent(KafkaConformance):
    scheme = "kafka+confluent"
    source_settings = QUICK["kafka+confluent"]
