"""What Kafka refuses is refused alone: the others of its batch are stored, and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from holdfast.brokers.kafka import KafkaBroker
from holdfast.clock import SystemClock
from holdfast.db.engine import open_database
from holdfast.errors import InvalidMessage, Transient
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.schema import parked
from holdfast.outbox.wal import WalEngine
from holdfast.testing import wait_until
from holdfast.urls import BrokerUrl
from tests.kafka.members import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Kafka

SMALL_BATCHES: dict[str, dict[str, Any]] = {
    "kafka": {"batch_size": 3000},
    "kafka+confluent": {"batch.num.messages": 10},
}
"""Settings with which a publish makes many record batches, some behind a refused one."""
KEYLESS = (13, 17, 60, 119)


class HastyClock(SystemClock):
    """A clock on which an hour passes once it has been looked at *looks* times."""

    looks = 10**9

    def monotonic(self) -> float:
        self.looks -= 1
        return super().monotonic() + (3600 if self.looks < 0 else 0)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock() -> HastyClock:
    return HastyClock()


@pytest.fixture
def broker(scheme: str, kafka: Kafka, clock: HastyClock) -> Iterator[KafkaBroker]:
    """Return a connection by either driver."""
    broker = KafkaBroker(BrokerUrl.parse(f"{scheme}://{kafka.address}"), clock=clock)
    yield broker
    broker.close()


@pytest.fixture
def topic(kafka: Kafka) -> str:
    """Return a new compacted topic: it takes no message without a key."""
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"compacted-{new_id()[-12:]}"
    new = NewTopic(name, num_partitions=3, config={"cleanup.policy": "compact"})
    admin = AdminClient({"bootstrap.servers": kafka.address})  # it must outlive its answer
    admin.create_topics([new])[name].result()
    return name


def batch(topic: str) -> list[Message]:
    """Return messages of seven keys, and some without."""
    return [
        Message.new(topic, b"%d" % n, key=None if n in KEYLESS else b"key %d" % (n % 7))
        for n in range(120)
    ]


GOOD = set(range(120)) - set(KEYLESS)


def check_stored(broker: KafkaBroker, topic: str) -> None:
    """See every number but the refused ones in the topic; each key's in order, repeats aside."""
    source, found = broker.source([topic], group=f"g-{new_id()}"), []

    def is_all() -> bool:
        found.extend(batch := source.poll(500, 0.1))
        source.accept(batch)
        return {int(delivery.body or b"-1") for delivery in found} >= GOOD

    wait_until(is_all, deadline=60, what="all messages")
    source.close()
    by_key: dict[bytes | None, list[int]] = {}
    for delivery in found:
        by_key.setdefault(delivery.key, []).append(int(delivery.body or b"-1"))
    assert None not in by_key
    for numbers in by_key.values():
        first = list(dict.fromkeys(numbers))
        assert first == sorted(first)


@pytest.mark.parametrize("located", [True, False])
def test_the_others_of_a_refused_messages_batch_are_stored_in_order(
    broker: KafkaBroker, topic: str, scheme: str, *, located: bool
) -> None:
    """Kafka refuses record batches; the sink tells who is to blame and stores the others.

    Also where a client reports failures only, and one of its reports gets lost.
    """
    sink = broker.sink(**SMALL_BATCHES[scheme])
    messages = batch(topic)
    for again in (1, 2):  # the sink is as good as new afterwards
        results = sink.publish(messages) if located else sink.publish_within(messages, 60.0)
        refused = [n for n, result in enumerate(results) if result.error is not None]
        assert refused == list(KEYLESS), again
        assert all(isinstance(results[n].error, InvalidMessage) for n in refused)
    sink.close()
    check_stored(broker, topic)


def test_a_refused_message_of_a_transaction_is_named(
    broker: KafkaBroker, topic: str, scheme: str
) -> None:
    """The others are rolled back, whether they were sent with it, behind it or not at all."""
    sink = broker.sink(transactional_id=f"t-{topic}", **SMALL_BATCHES[scheme])
    messages, to_blame = batch(topic), set()
    while True:
        results = sink.publish(messages)
        kinds = {type(result.error) for result in results}
        if kinds == {type(None)}:
            break
        assert kinds == {InvalidMessage, Transient}
        named = {m.payload for m, r in zip(messages, results, strict=True)
                 if isinstance(r.error, InvalidMessage)}  # fmt: skip
        messages = [message for message in messages if message.payload not in named]
        to_blame |= named
    sink.close()
    assert to_blame == {b"%d" % n for n in KEYLESS}
    check_stored(broker, topic)


@pytest.mark.parametrize("scheme", ["kafka"], indirect=True)
def test_time_that_runs_out_among_refused_messages_loses_no_progress(
    broker: KafkaBroker, topic: str, clock: HastyClock
) -> None:
    """kafka-python tells of one refused message at a time; the rest comes back to be repeated."""
    sink = broker.sink()
    left = [Message.new(topic, b"%d" % n) for n in range(60)]
    rounds = 0
    while left:
        clock.looks, rounds = 50, rounds + 1
        results = sink.publish(left)
        assert isinstance(results[0].error, InvalidMessage)
        assert all(result.error is not None for result in results)
        left = [
            message
            for message, result in zip(left, results, strict=True)
            if not isinstance(result.error, InvalidMessage)
        ]
        clock.looks = 10**9
    sink.close()
    assert 1 < rounds < 10


@pytest.mark.parametrize("kind", ["lease", "wal"])
def test_a_relay_parks_what_kafka_refuses_and_everything_else_flows(
    kind: str,
    broker: KafkaBroker,
    topic: str,
    scheme: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing is taken for an outage, and nothing of another key waits for it."""
    url = f"sqlite:///{tmp_path}/shop.db"
    if kind == "wal":
        url = request.getfixturevalue("postgres").database(f"refused_{new_id()[-12:]}")
    engine = open_database(url)
    create_tables(engine)
    events = [
        Event(body=m.payload or b"", topic=topic, key=m.key_text)
        for m in batch(topic)
    ]  # fmt: skip
    with engine.begin() as db:
        Outbox().add_all(db, events)
    sink = broker.sink(**SMALL_BATCHES[scheme])
    relaying = {"lease": LeaseEngine, "wal": WalEngine}[kind](engine, sink)
    assert Relay(relaying).run_once() == 116
    sink.close()
    with engine.connect() as db:
        rows = db.execute(select(parked.c.payload, parked.c.error).order_by(parked.c.seq)).all()
    engine.dispose()
    assert [int(row.payload) for row in rows] == list(KEYLESS)
    assert all("INVALIDRECORD" in row.error.upper().replace("_", "") for row in rows)
    check_stored(broker, topic)
