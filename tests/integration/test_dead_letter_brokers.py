"""A dead letter survives the journey over every broker, and over a broker that goes down."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic, create_tables
from holdfast.dlq.store.schema import message
from holdfast.dlq.topic.collector import Collector
from holdfast.dlq.topic.topic import COLLECTOR
from holdfast.errors import BrokerDown, DependencyDown
from holdfast.headers import Headers
from holdfast.testing import wait_until
from tests.dead_letters import count, failed, letter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter
    from holdfast.message import Message
    from holdfast.ports import Broker, Published
    from tests.servers.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
HEADERS = Headers([("x", b"\xff\x00"), ("x", "two"), ("plain", "text")])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Open a store."""
    made = open_database(f"sqlite:///{tmp_path}/store.db")
    create_tables(made)
    yield made
    made.dispose()


@pytest.fixture(params=["kafka", "rabbitmq", "redis", "nats", "memory"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Open each broker."""
    url = "memory:" if request.param == "memory" else request.getfixturevalue(request.param).url
    made = connect(url)
    yield made
    made.close()


def test_the_letter_is_the_same_behind_every_broker(broker: Broker, engine: Engine) -> None:
    """Body, key, headers and the whole failure, also with an error text of 10 MB."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    home = DeadLetterTopic.on(broker)
    error = failed(ValueError("big \x1b[31m" + "x" * 10_000_000))
    put = [
        letter(1, topic=topic, payload=b"\x00\xffbinary", headers=HEADERS),
        letter(2, error, topic=topic),
    ]
    for one in put:
        home.put(one)
    home.close()
    source = broker.source([f"{topic}.billing.dlq"], group=COLLECTOR)
    collector = Collector(source, DeadLetterStore(engine))

    def collected() -> bool:
        if batch := source.poll(10, 1.0):
            collector.collect(batch)
        return count(engine, message) == 2

    wait_until(collected, deadline=60)
    source.close()
    for one in put:
        stored = DeadLetterStore(engine).get(one.dlq_id)
        assert stored is not None
        assert stored.message == one.message
        assert stored.culprit == one.culprit
        assert stored.failure.root.type == one.failure.root.type
        assert stored.history.failures[-1].id == one.history.failures[-1].id


class Down:
    """A sink whose broker is away."""

    def __init__(self, broker: Broker) -> None:
        self.caps = broker.caps

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Fail."""
        raise BrokerDown("no broker")

    def close(self) -> None:
        """Do nothing."""


def test_a_broker_that_is_down_leaves_the_letter_in_the_database(engine: Engine) -> None:
    """As a row marked quarantine; without a database nothing may be acknowledged."""
    broker = connect("memory:")
    put = letter()
    DeadLetterTopic(Down(broker), quarantine=DeadLetterStore(engine)).put(put)
    stored = DeadLetterStore(engine).get(put.dlq_id)
    assert stored is not None
    assert stored.origin == "quarantine"
    with pytest.raises(DependencyDown):
        DeadLetterTopic(Down(broker)).put(put)
    broker.close()


def large(topic: str, size: int) -> DeadLetter:
    """Return the letter of a message of *size* bytes with much to tell about its failure."""
    error = failed(ValueError("the root"))
    for _ in range(9):
        outer = ValueError("much to tell " * 100)
        outer.__cause__ = error
        error = failed(outer)
    return letter(1, error, topic=topic, payload=b"x" * size)


@pytest.fixture(params=["kafka", "kafka+confluent"])
def kafka_broker(request: pytest.FixtureRequest, kafka: Server) -> Iterator[Broker]:
    """Open Kafka through each of its drivers."""
    made = connect(kafka.url.replace("kafka://", f"{request.param}://"))
    yield made
    made.close()


def narrow(kafka: Server, topic: str, size: int) -> None:
    """Create *topic* for messages of *size* bytes."""
    admin = AdminClient({"bootstrap.servers": kafka.url.removeprefix("kafka://")})
    made = NewTopic(topic, num_partitions=1, config={"max.message.bytes": str(size)})
    [future] = admin.create_topics([made]).values()
    future.result()


def test_a_message_at_the_limit_of_its_topic_has_room_for_its_envelope(
    kafka: Server, kafka_broker: Broker, engine: Engine
) -> None:
    """A dead-letter topic takes more than the topic of its originals, and so does the client."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    narrow(kafka, topic, 1_048_576)
    made = large(topic, 1_048_576 - 300)
    home = DeadLetterTopic.on(kafka_broker)
    home.put(made)
    home.close()
    source = kafka_broker.source([f"{topic}.billing.dlq"], group=COLLECTOR)
    Collector(source, DeadLetterStore(engine)).run(until_idle=True)
    source.close()
    stored = DeadLetterStore(engine).get(made.dlq_id)
    assert stored is not None
    assert stored.message == made.message
    assert stored.failure.root == made.failure.root


def test_a_message_that_leaves_little_room_goes_with_the_least_envelope(
    kafka: Server, kafka_broker: Broker, engine: Engine
) -> None:
    """Its topic was made by somebody else; where not even that fits, the error names the knob."""
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    narrow(kafka, f"{topic}.billing.dlq", 100_000)
    home = DeadLetterTopic.on(kafka_broker)
    tight = large(topic, 100_000 - 4_000)
    home.put(tight)
    with pytest.raises(DependencyDown, match=r"to 10\d,\d{3} bytes.*max\.message\.bytes of the"):
        home.put(large(topic, 100_000))
    home.close()
    source = kafka_broker.source([f"{topic}.billing.dlq"], group=COLLECTOR)
    Collector(source, DeadLetterStore(engine)).run(until_idle=True)
    source.close()
    stored = DeadLetterStore(engine).get(tight.dlq_id)
    assert stored is not None
    assert stored.message == tight.message
    assert stored.failure.root.type == "ValueError"
    assert count(engine, message) == 1
