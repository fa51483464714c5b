"""Kafka through both drivers, against the raw clients used at their best."""

from __future__ import annotations

import itertools
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from figures import Figure, Goal, compare, rate
from holdfast.brokers import connect
from holdfast.cloudevents import to_wire
from holdfast.message import Message
from tests.servers import Kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.ports import Broker

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own
    import kafka
import confluent_kafka

BODY = b"x" * 300
BATCH = 5_000
FETCH = 500
PARTITIONS = 4
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One driver: how many messages a round takes, and the raw client's best loops."""

    name: str
    scheme: str
    count: int
    produce: Callable[[str, list[Message]], float]
    consume: Callable[[str, str, int], float]
    publish_limit: str
    """What the adapter's time beyond the raw client's goes into."""
    consume_limit: str


def figures() -> Iterable[Figure]:
    """Measure publishing and consuming with accepts, driver by driver."""
    with Kafka() as server:
        sides = [
            Side(
                name="kafka-python",
                scheme="kafka",
                count=10_000,
                produce=lambda topic, messages: _python_produce(server.address, topic, messages),
                consume=lambda topic, group, count: _python_consume(
                    server.address, topic, group, count
                ),
                publish_limit="the client's own work per record dominates both",
                consume_limit="the client's own decoding dominates both",
            ),
            Side(
                name="confluent",
                scheme="kafka+confluent",
                count=100_000,
                produce=lambda topic, messages: _confluent_produce(server.address, topic, messages),
                consume=lambda topic, group, count: _confluent_consume(
                    server.address, topic, group, count
                ),
                publish_limit="limited by making the headers (1.4 us of CPU each), a result with "
                "the offset per message, and the wait for the last answer of every batch",
                consume_limit="limited by the headers, which librdkafka's binding turns into "
                "Python objects, and by one Delivery and one entry in the watermark per message",
            ),
        ]
        for side in sides:
            yield from _side(side, connect(f"{side.scheme}://{server.address}"))
        yield _drivers(sides, server.address)


def _side(side: Side, broker: Broker) -> Iterator[Figure]:
    topic = _topic(broker)
    messages = _messages(topic, side.count)
    detail = f"{side.count} messages of 300 B with key and headers, {PARTITIONS} partitions"
    side.produce(topic, messages)  # warm
    yield compare(
        f"kafka publish, {side.name}",
        ours=lambda: _publish(broker, messages),
        peer=lambda: side.produce(topic, messages),
        unit="messages/s",
        goal=Goal(at_least=0.8),
        detail=f"{detail}, batches of {BATCH} against one unbroken stream whose headers are made "
        f"beforehand; acks=all, idempotent; {side.publish_limit}",
    )
    yield compare(
        f"kafka consume and accept, {side.name}",
        ours=lambda: _consume(broker, topic, side.count),
        peer=lambda: side.consume(topic, f"raw-{next(_numbers)}", side.count),
        unit="messages/s",
        goal=Goal(at_least=0.8),
        detail=f"{detail}; both read key, value, headers, offset and time of each message, the raw "
        f"loop commits at its end; {side.consume_limit}",
    )
    broker.close()


def _drivers(sides: list[Side], address: str) -> Figure:
    slow, fast = (connect(f"{side.scheme}://{address}") for side in sides)
    few, many = (_messages(_topic(slow), side.count) for side in sides)
    try:
        return compare(
            "kafka publish, confluent against kafka-python",
            ours=lambda: _publish(fast, many),
            peer=lambda: _publish(slow, few),
            unit="messages/s",
            goal=Goal(at_least=5.0),
            detail="the same adapter over either driver",
            rounds=3,
        )
    finally:
        slow.close()
        fast.close()


def _topic(broker: Broker) -> str:
    topic = f"bench-{next(_numbers)}"
    broker.create_topic(topic, partitions=PARTITIONS)
    return topic


def _messages(topic: str, count: int) -> list[Message]:
    return [Message.new(topic, BODY, key=b"key-%d" % (n % 997)) for n in range(count)]


# -- ours ------------------------------------------------------------------------------


def _publish(broker: Broker, messages: list[Message]) -> float:
    sink = broker.sink()
    sink.publish(messages[:10])

    def work() -> None:
        for start in range(0, len(messages), BATCH):
            results = sink.publish(messages[start : start + BATCH])
            assert all(result.error is None for result in results)

    try:
        return rate(work, len(messages))
    finally:
        sink.close()


def _consume(broker: Broker, topic: str, count: int) -> float:
    source = broker.source([topic], group=f"ours-{next(_numbers)}")
    first: list[Any] = []
    while not first:
        first = source.poll(1, 1.0)
    source.accept(first)

    def work() -> None:
        left = count - 1
        while left > 0:
            got = source.poll(FETCH, 1.0)
            source.accept(got)
            left -= len(got)
        source.flush()

    try:
        return rate(work, count - 1)
    finally:
        source.close()


# -- raw kafka-python --------------------------------------------------------------------


def _python_produce(address: str, topic: str, messages: list[Message]) -> float:
    records = [(m.payload, m.key, list(to_wire(m))) for m in messages]
    producer = kafka.KafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True)
    producer.send(topic, value=BODY).get(30)

    def work() -> None:
        futures = [
            producer.send(topic, value=value, key=key, headers=headers)
            for value, key, headers in records
        ]
        producer.flush()
        assert all(future.succeeded() for future in futures)

    try:
        return rate(work, len(records))
    finally:
        producer.close()


def _python_consume(address: str, topic: str, group: str, count: int) -> float:
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=address,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level="read_committed",
    )
    while not consumer.poll(1000, max_records=1):
        pass

    def work() -> None:
        left = count - 1
        while left > 0:
            for records in consumer.poll(1000, max_records=FETCH).values():
                for record in records:
                    _ = (record.key, record.value, record.headers, record.offset, record.timestamp)
                left -= len(records)
        consumer.commit()

    try:
        return rate(work, count - 1)
    finally:
        consumer.close()


# -- raw confluent-kafka -----------------------------------------------------------------


def _confluent_produce(address: str, topic: str, messages: list[Message]) -> float:
    records = [(m.payload, m.key, list(to_wire(m))) for m in messages]
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "enable.idempotence": True, "acks": "all"}
    )
    producer.produce(topic, BODY)
    producer.flush()
    errors: list[Any] = []
    delivered = 0

    def report(error: Any, _: Any) -> None:
        nonlocal delivered
        if error is None:
            delivered += 1
        else:
            errors.append(error)

    def work() -> None:
        produce, poll = producer.produce, producer.poll
        for number, (value, key, headers) in enumerate(records):
            try:
                produce(topic, value, key, on_delivery=report, headers=headers)
            except BufferError:
                poll(0.1)
                produce(topic, value, key, on_delivery=report, headers=headers)
            if number % 1000 == 0:
                poll(0)
        producer.flush()
        assert delivered == len(records)
        assert not errors

    return rate(work, len(records))


def _confluent_consume(address: str, topic: str, group: str, count: int) -> float:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    while consumer.poll(1.0) is None:
        pass

    def work() -> None:
        left = count - 1
        while left > 0:
            records = consumer.consume(FETCH, 1.0)
            for record in records:
                assert record.error() is None
                _ = (record.topic(), record.partition(), record.offset(), record.timestamp())
                _ = (record.key(), record.value(), record.headers())
            left -= len(records)
        consumer.commit(asynchronous=False)

    try:
        return rate(work, count - 1)
    finally:
        consumer.close()


if __name__ == "__main__":
    began = time.monotonic()
    for figure in figures():
        print(figure)
    print(f"{time.monotonic() - began:.0f} s")
