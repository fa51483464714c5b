"""A topic that is missing is a wrong setting: its events wait, and nothing is parked."""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.db.engine import open_database
from holdfast.dlq.replay.target import Target
from holdfast.errors import ConfigurationError, UnknownTopic
from holdfast.headers import replay_topic
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.outbox import Event, LeaseEngine, LeaseTerms, Outbox, Relay, create_tables
from holdfast.outbox.relay.monitoring import Probes
from holdfast.outbox.schema import outbox, parked
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.testing import wait_until
from tests.kafka.members import SCHEMES
from tests.wal.shop import steps_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Kafka


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "wal"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return which database, and `wal` for PostgreSQL's log."""
    return str(request.param)


@pytest.fixture
def engine(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Yield a database of its own with the outbox tables."""
    url = f"sqlite:///{tmp_path}/shop.db"
    if kind != "sqlite":
        server = request.getfixturevalue("postgres" if kind == "wal" else kind)
        url = server.database(f"missing_{zlib.crc32(request.node.name.encode())}")
    engine = open_database(url)
    create_tables(engine)
    yield engine
    if kind == "wal":
        drop_slot(engine)
    engine.dispose()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Any]:
    """Yield a broker that makes no topics by itself, with one called `there`."""
    broker: Any = connect(f"sqlite:///{tmp_path}/b.db?auto_create=false")
    broker.create_topic("there")
    yield broker
    broker.close()


def moving(kind: str, engine: Engine, sink: Any, **options: Any) -> Any:
    """Return the engine of a relay."""
    make = WalEngine if kind == "wal" else LeaseEngine
    return make(engine, sink, terms=LeaseTerms(seconds=60), **options)


def stage(engine: Engine, *events: tuple[str, str, str]) -> None:
    """Commit events of topic, key and text, one transaction each."""
    for topic, key, body in events:
        with engine.begin() as db:
            Outbox().add_all(db, [Event(body=body, topic=topic, key=key)])


def count(engine: Engine, table: Any) -> int:
    """Return how many rows *table* has."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def stored(broker: Any, topic: str, many: int) -> list[tuple[str, str]]:
    """Return key and text of the first *many* messages of the topic, in order."""
    source = broker.source([topic], group=f"g-{new_id()}")
    found: list[tuple[str, str]] = []

    def is_all() -> bool:
        batch = source.poll(100, 0.2)
        found.extend(((d.key or b"").decode(), (d.body or b"").decode()) for d in batch)
        source.accept(batch)
        return len(found) >= many

    wait_until(is_all, deadline=60, what=f"{many} messages")
    source.close()
    return found


def test_events_of_a_missing_topic_wait_and_others_go_on(
    kind: str, engine: Engine, broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is parked; when the topic is made, its events go out in the order of their keys."""
    caplog.set_level(logging.WARNING, "holdfast.outbox")
    sink = broker.sink()
    relay = moving(kind, engine, sink, batch=2)
    stage(engine, ("gone", "k", "1"), ("there", "k", "a"), ("gone", "k", "2"), ("there", "k", "b"))
    steps_until(relay, lambda: count(engine, outbox) == 2, "the others are published")
    stage(engine, ("gone", "k", "3"), ("gone", "j", "1"), ("there", "k", "c"))
    steps_until(relay, lambda: count(engine, outbox) == 4, "the others are published")
    wait_until(lambda: relay.step().missing == ("gone",), what="it says what is missing")
    assert count(engine, parked) == 0
    told = [r for r in caplog.records if "gone" in r.getMessage() and "wait" in r.getMessage()]
    assert len(told) == 1, told  # once, then summed up
    broker.create_topic("gone")
    steps_until(relay, lambda: count(engine, outbox) == 0, "everything is published", deadline=60)
    wait_until(lambda: relay.step().missing == (), what="nothing is missing")
    relay.close()
    sink.close()
    assert count(engine, parked) == 0
    assert stored(broker, "there", 3) == [("k", "a"), ("k", "b"), ("k", "c")]
    assert [body for key, body in stored(broker, "gone", 4) if key == "k"] == ["1", "2", "3"]


def test_many_events_of_a_missing_topic_do_not_keep_others_from_being_read(
    kind: str, engine: Engine, broker: Any
) -> None:
    """More of them than a pass reads lie before the first event of another topic."""
    with engine.begin() as db:
        many = [Event(body=str(n), topic="gone", key=str(n)) for n in range(100)]
        Outbox().add_all(db, many)
    stage(engine, ("there", "k", "a"))
    sink = broker.sink()
    relay = moving(kind, engine, sink, batch=1)
    steps_until(relay, lambda: count(engine, outbox) == 100, "the other event is published")
    relay.close()
    sink.close()
    assert count(engine, parked) == 0


def test_a_relay_with_a_missing_topic_is_alive_and_not_ready(
    kind: str, engine: Engine, broker: Any
) -> None:
    """The probe names the topic."""
    stage(engine, ("gone", "k", "1"))
    sink = broker.sink()
    relay = Relay(moving(kind, engine, sink))
    assert relay.run_once() == 0
    probes = Probes(relay.health)
    assert probes.alive().good
    assert not probes.ready().good
    assert "gone" in probes.ready().why
    sink.close()


@pytest.mark.parametrize("kind", ["sqlite", "wal"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_missing_topic_of_kafka_is_found_before_anything_is_sent(
    scheme: str, kind: str, engine: Engine, kafka: Kafka
) -> None:
    """And found again soon after it was made."""
    broker: Any = connect(kafka.url.replace("kafka", scheme, 1))
    gone, there = f"gone-{new_id()}", f"there-{new_id()}"
    broker.create_topic(there)
    stage(engine, (gone, "k", "1"), (there, "k", "a"), (gone, "k", "2"))
    sink = broker.sink()
    relay = moving(kind, engine, sink)
    steps_until(relay, lambda: count(engine, outbox) <= 2, "the other is published", deadline=60)
    assert (count(engine, outbox), count(engine, parked)) == (2, 0)
    broker.create_topic(gone, partitions=3)
    steps_until(relay, lambda: count(engine, outbox) == 0, "all are published", deadline=60)
    relay.close()
    sink.close()
    assert stored(broker, gone, 2) == [("k", "1"), ("k", "2")]
    broker.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_setting_in_the_url_makes_the_topics_of_kafka(scheme: str, kafka: Kafka) -> None:
    """Sink and source make them alike, as many partitions and with the settings that it names."""
    url = kafka.url.replace("kafka", scheme, 1)
    made = "auto_create=true&partitions=3&replication_factor=1&topic.max.message.bytes=20000"
    broker: Any = connect(f"{url}?{made}")
    written, read = f"written-{new_id()}", f"read-{new_id()}"
    sink = broker.sink()
    assert [result.error for result in sink.publish([Message.new(written, b"1")])] == [None]
    assert sink.room([written]) == 20000
    sink.close()
    broker.source([read], group="g").close()
    known = broker.topics()
    assert (known[written], known[read]) == (3, 3)
    with pytest.raises(UnknownTopic):
        broker.lag("g", [f"asked-{new_id()}"])  # to ask makes nothing
    broker.close()
    plain: Any = connect(url)
    with pytest.raises(UnknownTopic, match="auto_create"):
        plain.source([f"none-{new_id()}"], group="g")
    plain.close()


@pytest.mark.parametrize("url", ["auto_create=maybe", "partitions=0", "replication_factor=x"])
def test_nonsense_about_topics_is_refused(url: str) -> None:
    """The sentence names the setting."""
    with pytest.raises(ConfigurationError, match=url.partition("=")[0]):
        connect(f"kafka://127.0.0.1:9092?{url}")


def test_a_replay_topic_has_as_many_partitions_as_its_topic(kafka: Kafka) -> None:
    """The consumer makes it so when it starts, and not for a topic that is missing."""
    topic, missing = f"orders-{new_id()}", f"missing-{new_id()}"
    broker: Any = connect(kafka.url)
    broker.create_topic(topic, partitions=5)
    consumer = Consumer(kafka.url, group="billing")

    @consumer.on(topic)
    def handle(message: Message) -> None:
        """Take it."""

    consumer.run(until_idle=True)
    assert broker.topics()[replay_topic(topic, "billing")] == 5
    with pytest.raises(UnknownTopic, match=missing):
        Target(broker, None).prepare([(missing, "billing")])
    assert replay_topic(missing, "billing") not in broker.topics()
    broker.close()
