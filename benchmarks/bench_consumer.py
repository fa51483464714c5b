"""The consumer: order per key against per partition, and batches against single transactions."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from typing import TYPE_CHECKING

from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table, insert
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from figures import Figure, Goal, compare, rate
from holdfast import Message, new_id
from holdfast.brokers import connect
from holdfast.consumer import Batches, Consumer, Order, create_tables
from holdfast.db.engine import open_database
from holdfast.idempotency import idempotent
from tests.servers import Postgres

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


def figures() -> Iterator[Figure]:
    """Measure how much one partition gains by running its keys side by side."""
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
