"""Triage of generated dead letters beside programs written by hand, and lanes of a replay.

Triage: rows a second, CPU-seconds and memory. `HOLDFAST_BENCH_RECORDS` sets the size, 5,000,000
unless given; the line of growth goes from a fifth of it to four times it. Every side runs in a
process of its own, JVM and workers included. Lanes: messages for each CPU-second of a warm session,
its JVM and workers included, beside the raw producer's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka
from bench_replay import PACE, TERMS, WHO, _frozen, _wire
from profiles import told, top
from sqlalchemy import update
from trees import cpu, memory

from figures import Figure, Goal, compare
from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.cloudevents import to_wire
from holdfast.db.engine import open_database
from holdfast.dlq.replay import Plans, Selection
from holdfast.dlq.replay.lane_sender import LaneOrder
from holdfast.dlq.replay.lease import PlanLease
from holdfast.dlq.replay.schema import lane as lanes
from holdfast.spark_jobs.generator import Recipe, generate
from holdfast.spark_jobs.planning import PlanRequest, make_plan
from holdfast.spark_jobs.replaying import SparkLanes
from holdfast.spark_jobs.session import session
from tests.servers import Kafka, Postgres
from tests.servers.install import spark_jars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from sqlalchemy.engine import Engine

RECORDS = int(os.environ.get("HOLDFAST_BENCH_RECORDS", "5000000"))
MESSAGES = int(os.environ.get("HOLDFAST_BENCH_MESSAGES", "200000"))
ROUNDS = 5
HERE = Path(__file__).parent
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run cost."""

    records: int
    seconds: float
    cpu: float
    peak_mb: float
    groups: int

    @property
    def rate(self) -> float:
        """Records a second, from the start of the process to its end."""
        return self.records / self.seconds

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s, {self.cpu:.1f} CPU-s, {self.peak_mb:,.0f} MB"


def figures() -> Iterator[Figure]:
    """Measure the lanes, every side of triage at the main size, and ours at two more sizes."""
    yield lanes_of_a_replay()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        main = made(Path(folder) / "main", RECORDS)
        names = ("ours_duckdb", "plain_duckdb", "plain_polars", "ours_spark", "plain_spark")
        sides = {name: measured(name, main, RECORDS) for name in names}
        for ours, peer in (("ours_duckdb", "plain_duckdb"), ("ours_duckdb", "plain_polars"),
                           ("ours_spark", "plain_spark")):  # fmt: skip
            found = cost(f"triage CPU of {RECORDS:,}: {ours} / {peer}", sides[ours], sides[peer])
            yield told(found, lambda ours=ours: profiled(ours, main))
        small = made(Path(folder) / "small", RECORDS // 5)
        large = made(Path(folder) / "large", RECORDS * 4)
        for name in ("ours_duckdb", "ours_spark"):
            one = measured(name, small, RECORDS // 5)
            many = measured(name, large, RECORDS * 4)
            yield growth(name, one, many)


def made(folder: Path, records: int) -> Path:
    """Return the letters of a generated folder."""
    return generate(folder, Recipe(records=records, entities=200_000, unknown_share=0.01)).letters


def measured(side: str, letters: Path, records: int) -> Measured:
    """Run *side* in a process of its own and look at all of its processes."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / "spark_peers.py"), side, str(letters)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, memory(process.pid))
        time.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - began
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    assert process.returncode == 0, side
    found = json.loads(said.splitlines()[-1])
    run = Measured(records=records, seconds=seconds, cpu=found["cpu"], peak_mb=peak,
                   groups=found["groups"])  # fmt: skip
    print(f"  {side} {records:,}: {run}, {run.groups:,} groups")
    return run


def profiled(side: str, letters: Path) -> str:
    """Return where the time of *side* goes."""
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "cProfile", "-o", file.name, str(HERE / "spark_peers.py"),
                   side, str(letters)]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return f"profile of the main thread: {top(file.name)}"


def lanes_of_a_replay() -> Figure:
    """Compare the messages that two tasks send for a CPU-second with the raw producer's."""
    with (
        Postgres() as postgres,
        Kafka() as kafka,
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
    ):
        engine = open_database(postgres.database("bench_spark"))
        Migrations(engine).upgrade()
        url = f"kafka+confluent://{kafka.address}"
        with closing(connect(url)) as broker:
            broker.create_topic("orders", partitions=4)
            plain = _frozen(engine, "group-spark", MESSAGES)
            topic, messages = _wire(engine, broker, plain)
        records = [(one.payload, one.key, list(to_wire(one))) for one in messages]
        Plans(engine).abort(plain, WHO)
        store = Path(folder) / "store-url"
        store.write_text(engine.url.render_as_string(hide_password=False))
        spark = session("bench", master="local[2,4]", jars=[str(jar) for jar in spark_jars()],
                        conf={"spark.log.level": "ERROR"})  # fmt: skip
        request = PlanRequest(
            database=f"${{file:{store}}}", selection=Selection(**plain.selection), terms=TERMS,
            lanes=2, staging=f"{folder}/staging",
        )  # fmt: skip
        plan = make_plan(spark, request, WHO).plan
        assert plan is not None
        send = SparkLanes(spark=spark, database=request.database, broker=url)
        found = compare(
            "two lanes of holdfast spark replay, confluent",
            ours=lambda: _lanes_sent(spark, engine, send, plan.id),
            peer=lambda: _raw_sent(kafka.address, topic, records),
            unit="messages/CPU-s",
            goal=Goal(at_least=0.8),
            detail=f"{MESSAGES} dead letters of 300 B in PostgreSQL, sent by two tasks of a warm "
            "local session: its JVM, its workers and the driver are counted, the servers are not; "
            "raw: one stream of the same records from memory, headers made beforehand",
            rounds=ROUNDS,
        )
        spark.stop()
        engine.dispose()
        return found


def _lanes_sent(spark: SparkSession, engine: Engine, send: SparkLanes, plan: str) -> float:
    """Send the plan from its beginning: nobody confirmed anything."""
    with engine.begin() as db:
        db.execute(update(lanes).where(lanes.c.plan_id == plan).values(sent=lanes.c.start))
    lease = PlanLease.take(engine, plan, seconds=60)
    order = LaneOrder(plan_id=plan, lanes=2, epoch=lease.epoch, gate=MESSAGES, batch=PACE.batch)
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    try:
        began = time.process_time() + cpu(jvm)
        results = send(order)
        took = time.process_time() + cpu(jvm) - began
    finally:
        lease.release()
    assert sum(one.sent for one in results) == MESSAGES, results
    return MESSAGES / took


def _raw_sent(address: str, topic: str, records: list[tuple[Any, ...]]) -> float:
    """Send *records* in one unbroken stream."""
    settings = {"bootstrap.servers": address, "enable.idempotence": True, "acks": "all"}
    producer = confluent_kafka.Producer(settings)
    errors: list[Any] = []

    def report(error: Any, _: Any) -> None:
        if error is not None:
            errors.append(error)

    began = time.process_time()
    for value, key, headers in records:
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=report, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    left = producer.flush()
    took = time.process_time() - began
    assert not errors, errors
    assert not left
    return len(records) / took


def cost(name: str, ours: Measured, peer: Measured) -> Figure:
    """Compare CPU-seconds: wall time says more about the neighbours."""
    ratio, goal = ours.cpu / peer.cpu, Goal(at_most=1.2)
    return Figure(
        name=name, ours=ours.cpu, peer=peer.cpu, unit="CPU-s", ratio=ratio, goal=str(goal),
        met=goal.met(ratio), detail=f"ours {ours}; by hand {peer}",
    )  # fmt: skip


def growth(name: str, small: Measured, large: Measured) -> Figure:
    """Compare the cost of a record in many with that in few: 1 is linear, below is better."""
    goal = Goal(at_most=1.2)
    ours, peer = (1e6 * run.cpu / run.records for run in (large, small))
    return Figure(
        name=f"{name}: a record of {large.records:,} / of {small.records:,}", ours=ours, peer=peer,
        unit="CPU-µs", ratio=ours / peer, goal=str(goal), met=goal.met(ours / peer),
        detail=f"memory {small.peak_mb:,.0f} MB → {large.peak_mb:,.0f} MB",
    )  # fmt: skip
