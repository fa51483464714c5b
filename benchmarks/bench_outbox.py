"""The outbox: what an event costs the writer, and how fast the lease engine drains."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any

from profiles import explained
from sqlalchemy import Column, Integer, LargeBinary, MetaData, String, Table, insert

from figures import Figure, Goal, against, compare, contest, rate
from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay, create_tables
from holdfast.ports import Published
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message

BODY = b"x" * 300
BACKLOG = int(os.environ.get("HOLDFAST_BENCH_BACKLOG", "100000"))
PROMISED = 100_000.0
tables = MetaData()
business = Table(
    "business",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", String(64)),
    Column("document", LargeBinary),
)


class NullSink:
    """Takes everything at once: what remains is the engine itself."""

    def __init__(self) -> None:
        self.caps = connect("memory:").caps
        self._taken = Published()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        return [self._taken] * len(messages)

    def close(self) -> None: ...


def figures() -> Iterator[Figure]:
    """Measure on a PostgreSQL of our own; the way to Kafka is measured with the WAL engine's."""
    with Postgres() as postgres:
        engine = open_database(postgres.database("bench"))
        create_tables(engine)
        tables.create_all(engine)
        yield insert_cost(engine, attached=True)
        yield insert_cost(engine, attached=False)
        yield from null_drain(engine)
        engine.dispose()


def insert_cost(engine: Engine, *, attached: bool) -> Figure:
    """Measure a transaction with one business row, with and without an event."""
    outbox, count = Outbox(), 400

    def plain() -> None:
        for n in range(count):
            with engine.begin() as db:
                db.execute(insert(business).values(customer=f"c{n}", document=BODY))

    def with_event() -> None:
        for n in range(count):
            with engine.begin() as db:
                row = insert(business).values(customer=f"c{n}", document=BODY)
                if attached:
                    db.execute(outbox.attach(row, BODY, topic="orders", key=f"c{n}"))
                else:
                    db.execute(row)
                    outbox.add(db, BODY, topic="orders", key=f"c{n}")

    return compare(
        f"outbox: insert cost, {'one statement (attach)' if attached else 'two statements (add)'}",
        ours=lambda: 1e6 / rate(with_event, count),
        peer=lambda: 1e6 / rate(plain, count),
        unit="µs per transaction",
        goal=Goal(at_most=1.15) if attached else Goal(),
        detail="PostgreSQL, SQLAlchemy Core, one business row of 300 bytes, commit to disk",
        rounds=7,
    )


def fill(engine: Engine, count: int = BACKLOG) -> None:
    """Stage a backlog."""
    with engine.begin() as db:
        db.exec_driver_sql("TRUNCATE holdfast_outbox")
        for start in range(0, count, 5000):
            events = [
                Event(body=BODY, topic="bench-orders", key=f"key-{n % 997}", type="OrderPlaced")
                for n in range(start, start + 5000)
            ]
            Outbox(source="bench").add_all(db, events)
        db.exec_driver_sql("ANALYZE holdfast_outbox")


def drain(engine: Engine, sink: Any) -> float:
    """Return rows per second of one relay that drains the backlog."""
    fill(engine)
    relay = Relay(LeaseEngine(engine, sink))
    gc.collect()
    start = time.perf_counter()
    moved = relay.run_once()
    took = time.perf_counter() - start
    assert moved == BACKLOG, f"{moved} of {BACKLOG} published"
    return moved / took


def null_drain(engine: Engine) -> Iterator[Figure]:
    """Measure the engine against a bare loop, and against the rate that was promised."""

    def ours() -> float:
        return drain(engine, NullSink())

    def floor() -> float:
        fill(engine)
        start, last = time.perf_counter(), 0
        raw = engine.raw_connection()
        cursor = raw.cursor()
        while True:
            cursor.execute(
                "SELECT seq, aggregatetype, aggregateid, payload, headers::text"
                " FROM holdfast_outbox WHERE seq > %s ORDER BY seq LIMIT 5000",
                (last,),
            )
            rows = cursor.fetchall()
            raw.commit()
            if not rows:
                break
            first, last = rows[0][0], rows[-1][0]
            cursor.execute("DELETE FROM holdfast_outbox WHERE seq BETWEEN %s AND %s", (first, last))
            raw.commit()
        raw.close()
        return BACKLOG / (time.perf_counter() - start)

    found = contest({"ours": ours, "floor": floor}, rounds=5)
    bare = against(
        "outbox: lease engine, backlog to a null sink",
        found["ours"],
        found["floor"],
        unit="rows/s",
        goal=Goal(at_least=0.5),
        detail="PostgreSQL, 300 bytes, one process; the peer is a bare SELECT, range DELETE loop "
        "without leases, order or parsing",
    )
    yield explained(bare, ours)
    promised = against(
        "outbox: lease engine, rows/s to a null sink",
        found["ours"],
        [PROMISED] * len(found["ours"]),
        unit="rows/s",
        goal=Goal(at_least=1),
        detail="PostgreSQL, 300 bytes, one process; the peer is the promised 100k rows/s",
    )
    yield explained(promised, ours)
