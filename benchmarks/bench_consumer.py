"""The consumer: against loops by hand and FastStream, order per key, batches, cost of an import.

Each side of the first figures is a process of its own (`consuming.py`) that reads the same
topic of Kafka and has dedup and effect in one database of PostgreSQL: alternately, in one run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from consuming import Base
from profiles import told, top
from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table, insert
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from figures import Figure, Goal, against, compare, contest, rate
from holdfast import Message, new_id
from holdfast.brokers import connect
from holdfast.consumer import Batches, Consumer, Order, create_tables
from holdfast.db.engine import open_database
from holdfast.idempotency import idempotent
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

COUNT, KEYS, BATCH = 2_000, 1_000, 200
tables = MetaData()
entries = Table(
    "entries",
    tables,
    Column("id", Integer, primary_key=True),
    Column("document", LargeBinary),
)
_BATCHED = (
    f"PostgreSQL, memory broker, {COUNT} messages, one insert each, 8 threads; up to {BATCH} "
    "messages in a transaction, against one transaction for each"
)
_DETAIL = f"memory broker, 1 partition, {COUNT} messages, {KEYS} keys, 32 threads, no database"


_PROGRAM = Path(__file__).with_name("consuming.py")
_SIDES = {
    # kind of ours: (kind by hand, messages, goal by hand, goal on FastStream)
    "single": ("single", 4_000, 1.0, 2.5),
    "batch": ("batch", 20_000, 0.35, 15.0),
    "batch-execute": ("batch", 20_000, 0.35, 15.0),
    "lists": ("batch", 20_000, 0.6, 25.0),
}
_FASTSTREAM = 1_000
"""Messages for FastStream, which commits the offset of each one by itself."""
_NAMES = {
    "single": "one transaction each",
    "batch": f"batch={BATCH}, session.add in a handler per message",
    "batch-execute": f"batch={BATCH}, session.execute in a handler per message",
    "lists": f"batch={BATCH}, lists",
}
_ROUNDS = 5
_CPU = "import time, {}; print(time.process_time())"


def figures() -> Iterator[Figure]:
    """Measure the whole consumer beside its peers, then what its parts gain."""
    with Kafka() as kafka, Postgres() as postgres:
        for kind in _SIDES:
            yield from _beside_peers(kind, kafka, postgres)
    yield compare(
        "consumer: CPU of its import / sqlalchemy.orm's",
        ours=lambda: _imported("holdfast.consumer"),
        peer=lambda: _imported("sqlalchemy.orm"),
        unit="s",
        goal=Goal(at_most=1.3),
        detail="a process that does nothing else",
    )
    yield compare(
        "consumer: order per key / per partition",
        ours=lambda: _handled(Order.KEY),
        peer=lambda: _handled(Order.LANE),
        unit="messages/s",
        goal=Goal(at_least=5.0),
        detail=_DETAIL,
    )

    with Postgres() as postgres:
        engine = open_database(postgres.database("bench_consumer"))
        create_tables(engine)
        tables.create_all(engine)
        for shape, whole, goal in (("one call for each", False, 2.0), ("lists", True, 5.0)):
            yield compare(
                f"consumer: batches, {shape} / one transaction per message",
                ours=lambda whole=whole: _entered(engine, Batches(size=BATCH, whole=whole)),  # type: ignore[misc]
                peer=lambda: _entered(engine, None),
                unit="messages/s",
                goal=Goal(at_least=goal),
                detail=_BATCHED,
            )
        engine.dispose()


def _beside_peers(kind: str, kafka: Kafka, postgres: Postgres) -> Iterator[Figure]:
    """Yield the rate and the CPU of each message, ours against a loop by hand and FastStream."""
    peer, count, by_hand, on_faststream = _SIDES[kind]
    topic, few = _filled(kafka, count), _filled(kafka, _FASTSTREAM)
    found = contest(
        {
            "ours": lambda: _started("ours", kind, kafka, postgres, topic, count),
            "hand": lambda: _started("hand", peer, kafka, postgres, topic, count),
            "faststream": lambda: _started(
                "faststream", "single", kafka, postgres, few, _FASTSTREAM
            ),
        },
        _ROUNDS,
    )
    detail = (
        f"Kafka (confluent), 4 partitions, {count} messages of 300 bytes, dedup and one insert in "
        "PostgreSQL; "
    )
    shape = "one transaction each" if peer == "single" else f"batches of {BATCH} by executemany"
    ours = found["ours"]
    for side, name, goal, how in (
        ("hand", "by hand", by_hand, f"by hand: psycopg, {shape}"),
        ("faststream", "FastStream", on_faststream, "FastStream: psycopg, one transaction each"),
    ):
        rates = against(
            f"consumer: {_NAMES[kind]} / {name}",
            [one["rate"] for one in ours], [one["rate"] for one in found[side]],
            unit="messages/s", goal=Goal(at_least=goal), detail=detail + how,
        )  # fmt: skip
        yield told(rates, lambda: _profile(kind, kafka, postgres, topic, count))
        yield against(
            f"consumer: {_NAMES[kind]} / {name}, CPU",
            [one["cpu"] * 1e6 for one in ours], [one["cpu"] * 1e6 for one in found[side]],
            unit="µs/message", goal=Goal(), detail=detail + how,
        )  # fmt: skip


def _profile(kind: str, kafka: Kafka, postgres: Postgres, topic: str, count: int) -> str:
    """Say where the CPU of our side goes."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/profile"
        _started("ours", kind, kafka, postgres, topic, count, "--profile", file)
        return f"profile of its threads, CPU: {top(file)}"


def _started(
    side: str, kind: str, kafka: Kafka, postgres: Postgres, topic: str, count: int, *more: str
) -> dict[str, float]:
    """Return what a process of its own found, on a database of its own."""
    url = postgres.database(f"bench_{side}_{time.monotonic_ns()}")
    engine = open_database(url)
    create_tables(engine)
    Base.metadata.create_all(engine)
    argv = [sys.executable, str(_PROGRAM), side, kind, kafka.address, url, topic, str(count)]
    argv += more
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    with engine.connect() as db:
        (entered,) = db.exec_driver_sql("SELECT count(*) FROM entries").one()
    engine.dispose()
    assert entered == count, f"{entered} of {count} effects"
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _filled(kafka: Kafka, count: int) -> str:
    """Return a new topic with *count* messages of 300 bytes."""
    broker = connect(f"kafka+confluent://{kafka.address}")
    topic = f"orders-{new_id()}"
    broker.create_topic(topic, partitions=4)
    with closing(broker.sink()) as sink:
        for start in range(0, count, 5_000):
            numbers = range(start, min(start + 5_000, count))
            sink.publish([
                Message.new(topic, _body(n), key=f"key-{n % KEYS}") for n in numbers
            ])  # fmt: skip
    return topic


def _body(number: int) -> bytes:
    return json.dumps({"n": number, "text": "x" * 280}).encode()


def _imported(module: str) -> float:
    argv = [sys.executable, "-c", _CPU.format(module)]
    return float(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _entered(engine: Engine, batch: Batches | None) -> float:
    """Return the rate of an idempotent handler that inserts a row, the whole runtime included."""
    broker = connect("memory:", partitions=4)
    topic = f"orders-{new_id()}"
    broker.create_topic(topic, partitions=4)
    with closing(broker.sink()) as sink:
        sink.publish([Message.new(topic, b"{}", key=f"key-{n % KEYS}") for n in range(COUNT)])
    consumer = Consumer(
        broker, group="bench", database=engine, workers=8, batch=500, backlog=COUNT,
        drain_seconds=5.0,
    )  # fmt: skip
    done = itertools.count(1)

    def handle(order: dict, session: Session) -> None:  # type: ignore[type-arg]
        handle_all([order], session)

    def handle_all(orders: list[dict], session: Session) -> None:  # type: ignore[type-arg]
        session.execute(insert(entries), [{"document": b"x" * 300} for _ in orders])
        if COUNT in [next(done) for _ in orders]:
            consumer.stop()  # what runs is committed and acknowledged first

    whole = batch is not None and batch.whole
    consumer.on(topic, batch=batch)(idempotent(handle_all if whole else handle))
    return rate(consumer.run, COUNT)


def _handled(order: Order) -> float:
    broker = connect("memory:", partitions=1)
    sink = broker.sink()
    sink.publish([Message.new("orders", b"{}", key=f"key-{n % KEYS}") for n in range(COUNT)])
    consumer = Consumer(
        broker, group="bench", order=order, workers=32, batch=500, backlog=COUNT,
        drain_seconds=5.0,
    )  # fmt: skip
    done = itertools.count(1)  # one step of it is atomic

    @consumer.on("orders")
    def handle(order: dict) -> None:  # type: ignore[type-arg]
        time.sleep(0.002)
        if next(done) == COUNT:
            consumer.stop()

    return rate(consumer.run, COUNT)
