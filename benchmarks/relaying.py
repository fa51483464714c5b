"""Draining a backlog, PostgreSQL → Kafka: our engines, and the same bytes by the raw clients."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer
from kafka import KafkaProducer
from sqlalchemy import create_engine, text

from figures import rate
from holdfast.brokers.kafka import KafkaBroker
from holdfast.outbox import LeaseEngine, Relay, create_tables
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from tests.servers import Kafka, Postgres

ROWS = int(os.environ.get("HOLDFAST_BENCH_ROWS", "300000"))
PYTHON_ROWS = min(ROWS, 40_000)
PAYLOAD = "x" * 300
HEADERS = (
    '[["ce_specversion", "1.0"], ["ce_id", "01234567-89ab-7def-8123-456789abcdef"],'
    ' ["ce_type", "OrderPlaced"], ["ce_source", "shop"],'
    ' ["ce_time", "2026-01-01T00:00:00.000000Z"], ["ce_partitionkey", "key-1"]]'
)
WIRE = [(name, value.encode()) for name, value in json.loads(HEADERS)]
_KEYS = [b"key-%d" % n for n in range(997)]
_CONFLUENT = "kafka+confluent"
_FILL = text(
    "INSERT INTO holdfast_outbox"
    " (id, aggregatetype, aggregateid, type, payload, headers, shard)"
    " SELECT gen_random_uuid(), :topic, 'key-' || n % 997, 'OrderPlaced',"
    " convert_to(:body, 'UTF8'), CAST(:headers AS json), n % 64"
    " FROM generate_series(1, :rows) AS n"
)


def fill(engine: Engine, topic: str, rows: int = ROWS) -> None:
    """Commit a backlog in one transaction."""
    values = {"topic": topic, "body": PAYLOAD, "headers": HEADERS, "rows": rows}
    with engine.begin() as db:
        db.execute(_FILL, values)


def drained(relay: Relay, rows: int) -> float:
    """Return the rate of *relay*, which must publish each of the *rows* exactly once."""
    start = time.perf_counter()
    moved = relay.run_once()
    took = time.perf_counter() - start
    assert moved == rows, f"{moved} of {rows} published"
    return rows / took


class Place:
    """One PostgreSQL and one Kafka, and the backlogs that are drained between them."""

    def __init__(self, postgres: Postgres, kafka: Kafka) -> None:
        self.postgres = postgres
        self.kafka = kafka
        self.broker = self._connect(_CONFLUENT)
        self.url = postgres.database("bench")
        self.engine = create_engine(self.url)
        create_tables(self.engine)
        self._topics = 0

    def _connect(self, scheme: str) -> KafkaBroker:
        return KafkaBroker(BrokerUrl.parse(f"{scheme}://{self.kafka.address}"))

    def topic(self) -> str:
        """Return a new topic."""
        self._topics += 1
        name = f"bench-{self._topics}"
        self.broker.create_topic(name, partitions=4)
        return name

    def empty(self) -> None:
        """Remove what is left in table and slot."""
        with self.engine.begin() as db:
            db.execute(text("TRUNCATE holdfast_outbox"))
        drop_slot(self.engine)

    def drain(self, kind: str, scheme: str = _CONFLUENT, rows: int = ROWS) -> float:
        """Return the rate of a relay that starts with the backlog there and ends without."""
        fill(self.engine, self.topic(), rows)
        with self._sink(scheme) as sink:
            engine = {"wal": WalEngine, "lease": LeaseEngine}[kind](self.engine, sink)
            return drained(Relay(engine), rows)

    def stream(self, scheme: str = _CONFLUENT, rows: int = ROWS) -> float:
        """Return the rate of a WAL relay that stands at the end of the log when it grows."""
        topic = self.topic()
        with self._sink(scheme) as sink:
            engine = WalEngine(self.engine, sink)
            try:
                while not engine.step().idle:
                    pass
                fill(self.engine, topic, rows)

                def follow() -> None:
                    moved = 0
                    while moved < rows:
                        moved += engine.step().published
                    assert moved == rows, f"{moved} of {rows} published"

                return rate(follow, rows)
            finally:
                engine.close()

    @contextmanager
    def _sink(self, scheme: str) -> Iterator[Any]:
        broker = self._connect(scheme)
        sink = broker.sink()
        try:
            yield sink
        finally:
            sink.close()
            broker.close()
            self.empty()

    def raw_python(self) -> float:
        """Return the rate of kafka-python itself, fed from memory."""
        topic, body = self.topic(), PAYLOAD.encode()
        producer = KafkaProducer(
            bootstrap_servers=self.kafka.address, acks="all", enable_idempotence=True, linger_ms=5
        )

        def produce() -> None:
            sent = [
                producer.send(topic, body, _KEYS[n % 997], headers=WIRE) for n in range(PYTHON_ROWS)
            ]
            producer.flush()
            assert all(future.succeeded() for future in sent)

        try:
            return rate(produce, PYTHON_ROWS)
        finally:
            producer.close()

    def raw_confluent(self) -> float:
        """Return the rate of confluent-kafka itself, fed from memory."""
        topic, body = self.topic(), PAYLOAD.encode()
        producer = Producer(self.client(**{"enable.idempotence": True, "linger.ms": 5}))
        acked = 0

        def report(error: object, _record: object) -> None:
            nonlocal acked
            assert error is None
            acked += 1

        def produce() -> None:
            for n in range(ROWS):
                while True:
                    try:
                        producer.produce(
                            topic, body, _KEYS[n % 997], on_delivery=report, headers=WIRE
                        )
                        break
                    except BufferError:
                        producer.poll(0.05)
                if n % 1000 == 0:
                    producer.poll(0)
            producer.flush()
            assert acked == ROWS

        return rate(produce, ROWS)

    def client(self, **more: Any) -> dict[str, Any]:
        """Return the settings of a client of confluent-kafka."""
        return {"bootstrap.servers": self.kafka.address, **more}

    @contextmanager
    def consumer(self, topic: str) -> Iterator[Consumer]:
        """Lend a consumer that sees records at once."""
        group = {"group.id": f"bench-{topic}-{time.monotonic_ns()}", "fetch.wait.max.ms": 5}
        consumer = Consumer(self.client(**group, **{"auto.offset.reset": "earliest"}))
        consumer.subscribe([topic])
        try:
            yield consumer
        finally:
            consumer.close()

    def stamps(self, topic: str, count: int) -> list[int]:
        """Return the timestamps of *count* records of *topic*."""
        stamps: list[int] = []
        with self.consumer(topic) as consumer:
            until = time.monotonic() + 600
            while len(stamps) < count and time.monotonic() < until:
                for record in consumer.consume(5000, 0.2):
                    assert record.error() is None
                    stamps.append(record.timestamp()[1])
        assert len(stamps) >= count, f"{len(stamps)} of {count}"
        return sorted(stamps)
