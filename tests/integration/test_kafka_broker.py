"""Kafka keeps the broker port's promises, through kafka-python and through confluent-kafka."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers import connect
from holdfast.brokers.kafka import KafkaBroker
from holdfast.errors import BrokerDown
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.ports import SinkPowers
from holdfast.testing.conformance import BrokerConformance
from holdfast.urls import BrokerUrl
from tests.kafka.members import QUICK, SILENCE, STEADY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.servers import Kafka


class KafkaConformance(BrokerConformance):
    """What both drivers share: a real server, and short sessions so that deaths show soon."""

    scheme = "kafka"
    session = SILENCE

    @pytest.fixture
    def url(self, own_kafka: Kafka) -> str:
        return f"{self.scheme}://{own_kafka.address}"

    @pytest.fixture
    def broker(self, url: str, own_kafka: Kafka, expires: bool) -> Iterator[KafkaBroker]:
        self.server = own_kafka
        self.source_settings = (QUICK if expires else STEADY)[self.scheme]  # type: ignore[misc]
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
    scheme = "kafka"


class TestConfluent(KafkaConformance):
    scheme = "kafka+confluent"


@pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
@pytest.mark.parametrize("driver", ["kafka", "kafka+confluent"])
def test_a_batch_to_kafka_is_given_up_when_the_lease_is_over(own_kafka: Kafka, driver: str) -> None:
    """It counts as an outage at once, and the next batch goes through a producer of its own."""
    topic = f"lease-{new_id()}"
    with ExitStack() as closing:
        broker = connect(f"{driver}://{own_kafka.address}")
        closing.callback(broker.close)
        broker.create_topic(topic)
        sink: Any = broker.sink()
        closing.callback(sink.close)
        assert isinstance(sink, SinkPowers)
        assert sink.keeps_deadlines
        batch = [Message.new(topic, b"%d" % n, key="k") for n in range(50)]
        assert [result.error for result in sink.publish_within(batch, 60.0)] == [None] * 50
        with pytest.raises(BrokerDown, match="no time was left"):
            sink.publish_within(batch, 0.0)
        own_kafka.pause()  # what is under way is not answered
        closing.callback(own_kafka.resume)
        with pytest.raises(BrokerDown):
            sink.publish_within(batch, 0.2)
        own_kafka.resume()
        assert [result.error for result in sink.publish(batch)] == [None] * 50
