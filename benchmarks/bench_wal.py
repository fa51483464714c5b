"""The WAL engine against a real Debezium and the raw Kafka producer, PostgreSQL → Kafka."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import Consumer, Producer
from kafka import KafkaProducer
from sqlalchemy import create_engine, text

from figures import Figure, Goal, compare, rate
from holdfast.brokers.kafka import KafkaBroker
from holdfast.caps import Caps, Ordering, Settle
from holdfast.message import Message
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.outbox.wal.stream import arguments
from holdfast.ports import Published
from holdfast.urls import BrokerUrl
from tests.servers import Kafka, Postgres, wait_until
from tests.servers.debezium import Debezium, outbox_router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from sqlalchemy.engine import Engine


ROWS = int(os.environ.get("HOLDFAST_BENCH_ROWS", "300000"))
EVENTS = 400
PAYLOAD = "x" * 300
HEADERS = (
    '[["ce_specversion", "1.0"], ["ce_id", "01234567-89ab-7def-8123-456789abcdef"],'
    ' ["ce_type", "OrderPlaced"], ["ce_source", "shop"],'
    ' ["ce_time", "2026-01-01T00:00:00.000000Z"], ["ce_partitionkey", "key-1"]]'
)
WIRE = [(name, value.encode()) for name, value in json.loads(HEADERS)]
PYTHON_ROWS = min(ROWS, 60_000)
FILL = text(
    "INSERT INTO holdfast_outbox"
    " (id, aggregatetype, aggregateid, type, payload, headers, shard)"
    " SELECT gen_random_uuid(), :topic, 'key-' || n % 997, 'OrderPlaced',"
    " convert_to(:body, 'UTF8'), CAST(:headers AS json), n % 64"
    " FROM generate_series(1, :rows) AS n"
)
RELAY = """
import signal, sys
from holdfast.brokers.kafka import KafkaBroker
from holdfast.outbox import Relay
from holdfast.outbox.wal import WalEngine
from holdfast.urls import BrokerUrl
sink = KafkaBroker(BrokerUrl.parse(sys.argv[2])).sink()
relay = Relay(WalEngine(sys.argv[1], sink))
signal.signal(signal.SIGTERM, lambda *_: relay.stop())
relay.run()
"""


def figures() -> Iterator[Figure]:
    """Measure the drain of a backlog and the latency of single events."""
    with Postgres() as postgres, Kafka() as kafka:
        place = Place(postgres, kafka)
        yield compare(
            "wal: backlog to a null sink, from the table",
            ours=place.null_from_table,
            peer=place.raw_table,
            unit="rows/s",
            goal=Goal(),
            detail=f"{place.rows} rows of 300 bytes; raw: psycopg reads the rows, deletes nothing",
            rounds=3,
        )
        yield compare(
            "wal: stream to a null sink",
            ours=place.null_from_stream,
            peer=place.raw_stream,
            unit="rows/s",
            goal=Goal(at_least=0.5),
            detail="one transaction; raw: psycopg receives the same stream and counts",
            rounds=3,
        )
        yield from kafka_figures(place, "wal")
        yield from place.latencies()


def kafka_figures(place: Place, kind: str) -> Iterator[Figure]:
    """Measure PostgreSQL → Kafka by one engine, against both raw producers and Debezium."""

    def ours() -> float:
        return place.kafka_drain(kind)

    def python() -> float:
        return place.kafka_drain(kind, "kafka", PYTHON_ROWS)

    raw = compare(
        f"{kind}: backlog to Kafka against the raw producer",
        ours=ours,
        peer=place.raw_produce,
        unit="rows/s",
        goal=Goal(at_least=0.5),
        detail=f"{place.rows} rows of 300 bytes, one process, confluent driver; raw: "
        "confluent-kafka fed from memory, same bytes and headers",
        rounds=3,
    )
    yield raw
    pure = compare(
        f"{kind}: backlog to Kafka against raw kafka-python",
        ours=python,
        peer=place.raw_python,
        unit="rows/s",
        goal=Goal(at_least=0.8),
        detail=f"{PYTHON_ROWS} rows; raw: kafka-python fed from memory, same bytes and headers",
        rounds=3,
    )
    yield pure
    debezium = compare(
        f"{kind}: backlog to Kafka against Debezium",
        ours=ours,
        peer=place.debezium_drain,
        unit="rows/s",
        goal=Goal(at_least=4),
        detail=f"{place.rows} rows; Debezium's rate is from its first to its last record, "
        "without its start",
        rounds=1,
    )
    yield debezium


class Null:
    """A sink that takes everything at once."""

    caps = Caps(settle=Settle.INDIVIDUAL, ordering=Ordering.KEY)

    def __init__(self) -> None:
        self.taken = 0

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        self.taken += len(messages)
        return [Published()] * len(messages)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Latency:
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Latency:
        cuts = statistics.quantiles(seconds, n=100)
        return cls(cuts[49] * 1000, cuts[98] * 1000)


class Place:
    """One PostgreSQL and one Kafka, and everything that is measured between them."""

    def __init__(self, postgres: Postgres, kafka: Kafka) -> None:
        self.rows = ROWS
        self._postgres = postgres
        self._kafka = kafka
        self._broker = KafkaBroker(BrokerUrl.parse(f"kafka+confluent://{kafka.address}"))
        self._url = postgres.database("bench")
        self._engine = create_engine(self._url)
        create_tables(self._engine)
        self._topics = 0

    def _topic(self) -> str:
        self._topics += 1
        name = f"bench-{self._topics}"
        self._broker.create_topic(name, partitions=4)
        return name

    def _fill(self, topic: str, engine: Engine | None = None, rows: int | None = None) -> None:
        count = self.rows if rows is None else rows
        values = {"topic": topic, "body": PAYLOAD, "headers": HEADERS, "rows": count}
        with (self._engine if engine is None else engine).begin() as db:
            db.execute(FILL, values)

    def _empty(self) -> None:
        with self._engine.begin() as db:
            db.execute(text("TRUNCATE holdfast_outbox"))
        drop_slot(self._engine)

    def _drain(self, sink: Any) -> float:
        """Return the rate of a relay that starts with the backlog there and ends without."""
        engine = WalEngine(self._engine, sink)
        figure = rate(Relay(engine).run_once, self.rows)
        self._empty()
        return figure

    def null_from_table(self) -> float:
        self._fill("orders")
        return self._drain(Null())

    def raw_table(self) -> float:
        self._fill("orders")

        def read() -> None:
            with psycopg.connect(**arguments(self._engine.url)) as db:
                cursor = db.cursor(name="rows", binary=True)
                cursor.itersize = 2000
                cursor.execute("SELECT * FROM holdfast_outbox ORDER BY seq")
                for _ in cursor:
                    pass

        figure = rate(read, self.rows)
        self._empty()
        return figure

    def null_from_stream(self) -> float:
        sink = Null()
        engine = WalEngine(self._engine, sink)
        while not engine.step().idle:
            pass
        self._fill("orders")

        def follow() -> None:
            while sink.taken < self.rows:
                engine.step()

        figure = rate(follow, self.rows)
        engine.close()
        self._empty()
        return figure

    def raw_stream(self) -> float:
        engine = WalEngine(self._engine, Null())
        while not engine.step().idle:
            pass
        engine.close()
        self._fill("orders")
        name = text("SELECT slot_name FROM pg_replication_slots")
        with self._engine.connect() as db:
            slot = db.execute(name).scalar_one()
        connection = psycopg.connect(
            **arguments(self._engine.url), replication="database", autocommit=True
        )
        connection.execute(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0"
            " (proto_version '1', publication_names 'holdfast_outbox', binary 'true')"
        )

        def count() -> None:
            left, get = self.rows, connection.pgconn.get_copy_data
            while left:
                size, view = get(0)
                if view[0] == 0x77 and view[25] == 0x49:
                    left -= 1
                    bytes(view[25:size])

        figure = rate(count, self.rows)
        connection.close()
        wait_until(lambda: self._unused(slot), "the slot is free")
        self._empty()
        return figure

    def _unused(self, slot: str) -> bool:
        query = text("SELECT NOT active FROM pg_replication_slots WHERE slot_name = :s")
        with self._engine.connect() as db:
            return bool(db.execute(query, {"s": slot}).scalar())

    def kafka_drain(
        self, kind: str, driver: str = "kafka+confluent", rows: int | None = None
    ) -> float:
        """Return the rate of a whole relay, of either engine, with either driver."""
        count = self.rows if rows is None else rows
        self._fill(self._topic(), rows=count)
        broker = KafkaBroker(BrokerUrl.parse(f"{driver}://{self._kafka.address}"))
        sink = broker.sink()
        engine = {"wal": WalEngine, "lease": LeaseEngine}[kind](self._engine, sink)
        try:
            return rate(Relay(engine).run_once, count)
        finally:
            sink.close()
            broker.close()
            self._empty()

    def raw_python(self) -> float:
        """Return the rate of kafka-python itself."""
        topic = self._topic()
        body, keys = PAYLOAD.encode(), [b"key-%d" % n for n in range(997)]
        producer = KafkaProducer(
            bootstrap_servers=self._kafka.address, acks="all", enable_idempotence=True, linger_ms=5
        )

        def produce() -> None:
            sent = [
                producer.send(topic, body, keys[n % 997], headers=WIRE) for n in range(PYTHON_ROWS)
            ]
            producer.flush()
            assert all(future.succeeded() for future in sent)

        try:
            return rate(produce, PYTHON_ROWS)
        finally:
            producer.close()

    def raw_produce(self) -> float:
        """Return the rate of confluent-kafka itself."""
        topic, headers = self._topic(), WIRE
        body, keys = PAYLOAD.encode(), [b"key-%d" % n for n in range(997)]
        producer = Producer(self._client(**{"enable.idempotence": True, "linger.ms": 5}))
        acked = 0

        def report(error: object, _record: object) -> None:
            nonlocal acked
            assert error is None
            acked += 1

        def produce() -> None:
            for n in range(self.rows):
                while True:
                    try:
                        producer.produce(
                            topic, body, keys[n % 997], on_delivery=report, headers=headers
                        )
                        break
                    except BufferError:
                        producer.poll(0.05)
                if n % 1000 == 0:
                    producer.poll(0)
            producer.flush()
            assert acked == self.rows

        return rate(produce, self.rows)

    def debezium_drain(self) -> float:
        """Let Debezium make its slot, commit the backlog while it is down, start it again."""
        name = f"debezium_{self._topics}"
        engine = create_engine(self._postgres.database(name))
        create_tables(engine)
        topic = self._topic()
        with Debezium(self._kafka, self._postgres, name, self._tuned()) as debezium:
            self._streams(engine, debezium)
            with Outboxes(engine) as outbox:
                outbox.add(topic, b"first")
            self._count(topic, 1)
            debezium.stop()
            self._fill(topic, engine)
            debezium.start()
            stamps = self._count(topic, self.rows + 1)[1:]
            debezium.stop()
        with engine.begin() as db:
            db.execute(text("SELECT pg_drop_replication_slot(:s)"), {"s": debezium.slot})
        engine.dispose()
        return len(stamps) / ((max(stamps) - min(stamps)) / 1000)

    @staticmethod
    def _tuned() -> dict[str, str]:
        return {
            **outbox_router(),
            "slot.drop.on.stop": "false",
            "poll.interval.ms": "5",
            "max.batch.size": "8192",
            "max.queue.size": "32768",
        }

    @staticmethod
    def _streams(engine: Engine, debezium: Debezium) -> None:
        query = text("SELECT active FROM pg_replication_slots WHERE slot_name = :s")

        def active() -> bool:
            with engine.connect() as db:
                return bool(db.execute(query, {"s": debezium.slot}).scalar())

        wait_until(active, "Debezium streams", 60)

    def _client(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self._kafka.address, **more}

    @contextmanager
    def _consumer(self, topic: str) -> Iterator[Consumer]:
        group = {"group.id": f"bench-{topic}-{time.monotonic_ns()}", "fetch.wait.max.ms": 5}
        consumer = Consumer(self._client(**group, **{"auto.offset.reset": "earliest"}))
        consumer.subscribe([topic])
        try:
            yield consumer
        finally:
            consumer.close()

    def _count(self, topic: str, count: int) -> list[int]:
        """Return the timestamps of *count* records of *topic*."""
        stamps: list[int] = []
        with self._consumer(topic) as consumer:
            until = time.monotonic() + 600
            while len(stamps) < count and time.monotonic() < until:
                for record in consumer.consume(5000, 0.2):
                    assert record.error() is None
                    stamps.append(record.timestamp()[1])
        assert len(stamps) >= count, f"{len(stamps)} of {count}"
        return sorted(stamps)

    def latencies(self) -> Iterator[Figure]:
        """Measure single events, a few milliseconds apart."""
        rounds = [(self._floor(), self._ours()) for _ in range(3)]
        floor, ours = (_median([pair[side] for pair in rounds]) for side in (0, 1))
        alone = self._sink_alone()
        peer = self._debezium()
        for which in ("p50", "p99"):
            mine, low, other = (getattr(found, which) for found in (ours, floor, peer))
            legs = f"; our sink alone, without database and log: {getattr(alone, which):.2f} ms"
            yield _figure(f"wal: commit → consumed {which} against the raw produce floor",
                          mine, low, Goal(at_most=1.5), legs)  # fmt: skip
            yield _figure(f"wal: commit → consumed {which} against Debezium",
                          mine, other, Goal(at_most=0.5))  # fmt: skip

    def _sink_alone(self) -> Latency:
        """Measure what the adapter adds: one event at a time through it, from memory."""
        topic, sink = self._topic(), self._broker.sink()

        def send(body: bytes) -> None:
            sink.publish([Message.new(topic, body, key="key", source="shop")])

        try:
            return self._latency(topic, send, before=True)
        finally:
            sink.close()

    def _floor(self) -> Latency:
        topic = self._topic()
        producer = Producer(self._client(**{"linger.ms": 0, "enable.idempotence": True}))

        def send(body: bytes) -> None:
            producer.produce(topic, body, b"key", headers=WIRE)
            producer.poll(0)

        latency = self._latency(topic, send, before=True)
        producer.flush()
        return latency

    def _ours(self) -> Latency:
        topic = self._topic()
        broker = f"kafka+confluent://{self._kafka.address}"
        process = subprocess.Popen([sys.executable, "-c", RELAY, self._url, broker])
        try:
            with Outboxes(self._engine) as outbox:
                return self._latency(topic, lambda body: outbox.add(topic, body), before=False)
        finally:
            process.terminate()
            process.wait(30)
            self._empty()

    def _debezium(self) -> Latency:
        engine = create_engine(self._postgres.database("latency"))
        create_tables(engine)
        topic = self._topic()
        with ExitStack() as closing:
            debezium = Debezium(self._kafka, self._postgres, "latency", self._tuned())
            closing.enter_context(debezium)
            self._streams(engine, debezium)
            outbox = closing.enter_context(Outboxes(engine))
            latency = self._latency(topic, lambda body: outbox.add(topic, body), before=False)
            debezium.stop()
        with engine.begin() as db:
            db.execute(text("SELECT pg_drop_replication_slot(:s)"), {"s": debezium.slot})
        engine.dispose()
        return latency

    def _latency(self, topic: str, send: Callable[[bytes], None], *, before: bool) -> Latency:
        """Send events one by one; count from the call (*before*) or from its return."""
        sent: dict[bytes, float] = {}
        seen: dict[bytes, float] = {}
        done = threading.Event()

        def write() -> None:
            for n in range(EVENTS + 20):
                body = b"%06d" % n + PAYLOAD.encode()
                start = time.perf_counter()
                send(body)
                sent[body] = start if before else time.perf_counter()
                time.sleep(0.004)  # pacing: each event alone, not in a batch
            done.set()

        with self._consumer(topic) as consumer:
            send(b"warm")
            while consumer.poll(1.0) is None:
                pass
            writer = threading.Thread(target=write)
            writer.start()
            until = time.monotonic() + 120
            while len(seen) < EVENTS + 20 and time.monotonic() < until:
                record = consumer.poll(0.5)
                if record is not None and record.error() is None:
                    seen[record.value() or b""] = time.perf_counter()
            writer.join()
        measured = [seen[body] - sent[body] for body in sorted(sent)][20:]
        return Latency.of(measured)


class Outboxes:
    """Commits one event at a time on one connection."""

    def __init__(self, engine: Engine) -> None:
        self._db = engine.connect()
        self._outbox = Outbox(source="shop")

    def add(self, topic: str, body: bytes) -> None:
        self._outbox.add_all(self._db, [Event(body=body, topic=topic, key="key")])
        self._db.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()


def _median(found: list[Latency]) -> Latency:
    return Latency(*(statistics.median(each) for each in zip(*map(astuple, found), strict=True)))


def _figure(name: str, ours: float, peer: float, goal: Goal, legs: str = "") -> Figure:
    ratio = ours / peer
    return Figure(
        name=name, ours=ours, peer=peer, unit="ms", ratio=round(ratio, 3), goal=str(goal),
        met=goal.met(ratio),
        detail=f"{EVENTS} events of 300 bytes, 4 ms apart; counted from the commit's return "
        "(floor: from the produce call, same bytes, headers and consumer); Debezium with "
        f"poll.interval.ms=5{legs}",
    )  # fmt: skip
