"""Draining a backlog, PostgreSQL → Kafka: our engines, and the same bytes by the raw clients.

`holdfast relay` and the relay by hand are processes, as users start them, and what they published
is read by an independent consumer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer
from kafka import KafkaProducer
from sqlalchemy import create_engine, text

from figures import rate
from holdfast.brokers.kafka import KafkaBroker
from holdfast.outbox import LeaseEngine, Relay, create_tables
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.urls import BrokerUrl
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
_OTHERS = [pair for pair in WIRE if pair[0] not in ("ce_id", "ce_partitionkey")]
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


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of process *pid*, of all its threads, those that ended as well."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drained(relay: Relay, rows: int) -> float:
    """Return the rate of *relay*, which must publish each of the *rows* exactly once."""
    start = time.perf_counter()
    moved = relay.run_once()
    took = time.perf_counter() - start
    assert moved == rows, f"{moved} of {rows} published"
    return rows / took


@dataclass(frozen=True, slots=True)
class Drain:
    """What the drain of a backlog by a process showed."""

    rate: float
    """Rows a second from the first to the last record, by the times that the records carry."""
    cpu: float
    """CPU-seconds of the process, its start included."""
    peak_mb: float


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

    def drain(self, kind: str, scheme: str = _CONFLUENT, rows: int = ROWS) -> Drain:
        """Let `holdfast relay --once` drain a backlog that is there when it starts."""
        return self._process(self.relay(kind, "--once", scheme=scheme), rows)

    def by_hand(self) -> Drain:
        """Let the relay by hand drain a backlog."""
        program = Path(__file__).with_name("relay_by_hand.py")
        dsn = self.url.replace("postgresql+psycopg", "postgresql")
        return self._process((sys.executable, str(program), dsn, self.kafka.address), ROWS)

    def stream(self) -> Drain:
        """Commit a backlog while a WAL relay stands at the end of the log."""
        topic = self.topic()
        process = subprocess.Popen(self.relay("wal"), stderr=subprocess.DEVNULL)
        fill(self.engine, topic, 1)
        self.stamps(topic, 1)
        fill(self.engine, topic)
        wait_until(self._is_empty, "all were published and deleted", 300)
        process.send_signal(signal.SIGTERM)
        return self._ended(process, lambda: self.stamps(topic, ROWS + 1)[1:])

    def relay(self, kind: str, *more: str, scheme: str = _CONFLUENT) -> tuple[str, ...]:
        """Return the command of a relay."""
        return (
            str(Path(sys.executable).with_name("holdfast")), "relay", "--engine", kind,
            "--database", self.url, "--broker", f"{scheme}://{self.kafka.address}", *more,
        )  # fmt: skip

    def _process(self, command: tuple[str, ...], rows: int) -> Drain:
        topic = self.topic()
        fill(self.engine, topic, rows)
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.execute(text("ANALYZE holdfast_outbox"))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self._ended(process, lambda: self.stamps(topic, rows))

    def _ended(self, process: subprocess.Popen[bytes], stamps: Callable[[], list[int]]) -> Drain:
        """Wait for *process*; it must have published each of its rows exactly once."""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, f"the relay ended with {process.returncode}"
        assert self._is_empty(), "rows are left"
        self.empty()
        moments = stamps()
        rate_ = len(moments) / ((moments[-1] - moments[0]) / 1000)
        return Drain(rate_, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)

    def _is_empty(self) -> bool:
        with self.engine.connect() as db:
            return not db.execute(text("SELECT EXISTS (SELECT FROM holdfast_outbox)")).scalar()

    def drain_here(self, kind: str, scheme: str = _CONFLUENT, rows: int = ROWS) -> float:
        """Return the rate of a drain in this process, for its profile."""
        fill(self.engine, self.topic(), rows)
        with self._sink(scheme) as sink:
            engine = {"wal": WalEngine, "lease": LeaseEngine}[kind](self.engine, sink)
            return drained(Relay(engine), rows)

    def stream_here(self) -> float:
        """Return the rate of a WAL relay in this process, for its profile."""
        topic = self.topic()
        with self._sink(_CONFLUENT) as sink:
            engine = WalEngine(self.engine, sink)
            try:
                while not engine.step().idle:
                    pass
                fill(self.engine, topic)

                def follow() -> None:
                    moved = 0
                    while moved < ROWS:
                        moved += engine.step().published
                    assert moved == ROWS, f"{moved} of {ROWS} published"

                return rate(follow, ROWS)
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
        return rate(lambda: self._produced(topic, ((body, WIRE) for _ in range(ROWS))), ROWS)

    def produce(self, topic: str, count: int) -> None:
        """Fill a topic with *count* messages of their own id and number."""

        def records() -> Iterator[tuple[bytes, Any]]:
            for number in range(count):
                own = [("ce_id", str(uuid.UUID(int=number)).encode())]
                yield json.dumps({"n": number, "text": "x" * 280}).encode(), [*_OTHERS, *own]

        self._produced(topic, records())

    def _produced(self, topic: str, records: Iterable[tuple[bytes, Any]]) -> None:
        producer = Producer(self.client(**{"enable.idempotence": True, "linger.ms": 5}))
        sent = acked = 0

        def report(error: object, _record: object) -> None:
            nonlocal acked
            assert error is None
            acked += 1

        for sent, (body, headers) in enumerate(records, 1):
            while True:
                try:
                    producer.produce(
                        topic, body, _KEYS[sent % 997], on_delivery=report, headers=headers
                    )
                    break
                except BufferError:
                    producer.poll(0.05)
            if sent % 1000 == 0:
                producer.poll(0)
        producer.flush()
        assert acked == sent

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
