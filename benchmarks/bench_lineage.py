"""The lineage: what it costs a transaction that stages events, or handles them, in batches.

Both sides run in pairs, each first every second time; the ratio is the median of those of the
pairs. What PostgreSQL's processes compute counts as well: most of a row's price is theirs.
"""

from __future__ import annotations

import gc
import itertools
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from profiles import explained
from sqlalchemy import Column, Integer, LargeBinary, MetaData, String, Table, insert
from sqlalchemy.orm import Session  # noqa: TC002 - handlers ask for it by annotation

from figures import Figure, Goal, against, contest
from holdfast.brokers import connect
from holdfast.consumer import Batches, Consumer
from holdfast.consumer import create_tables as create_consumer
from holdfast.db.engine import open_database
from holdfast.idempotency import idempotent
from holdfast.message import Message
from holdfast.outbox import Event, Outbox
from holdfast.outbox import create_tables as create_outbox
from holdfast.tracing import Lineage, create_tables
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

BODY = b"x" * 300
BATCH, TRANSACTIONS, PAIRS = 200, 10, 41
tables = MetaData()
business = Table(
    "business",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", String(64)),
    Column("document", LargeBinary),
)
STAGED = (
    f"PostgreSQL, SQLAlchemy Core, {BATCH} business rows of 300 bytes and their events in a "
    "transaction, commit to disk; the peer is the same transaction without a lineage"
)
HANDLED = (
    f"PostgreSQL, memory broker, an idempotent handler of lists, up to {BATCH} messages and their "
    "rows of 300 bytes in a transaction, from the poll to the acknowledgement; the peer is that "
    "consumer without a lineage"
)


def figures() -> Iterator[Figure]:
    """Measure on a PostgreSQL of our own: wall time, this process's CPU, and that of both."""
    with Postgres() as postgres:
        engine = open_database(postgres.database("bench"))
        for create in (create_outbox, create_consumer, create_tables, tables.create_all):
            create(engine)
        lineage = Lineage("shop")
        yield from cost(
            postgres, "staged", STAGED,
            lambda: _stage(engine, Outbox(source="shop", lineage=lineage)),
            lambda: _stage(engine, Outbox(source="shop")),
        )  # fmt: skip
        yield from cost(
            postgres, "handled", HANDLED, lambda: _handle(engine, lineage),
            lambda: _handle(engine, None),
        )  # fmt: skip
        engine.dispose()


def cost(
    postgres: Postgres, what: str, detail: str, ours: Callable[[], int], peer: Callable[[], int]
) -> Iterator[Figure]:
    """Return wall time and CPU of both sides, taken alternately in one run."""

    def timed(work: Callable[[], int]) -> Callable[[], list[float]]:
        def once() -> list[float]:
            gc.collect()
            server, wall, cpu = computed(postgres), time.perf_counter(), time.process_time()
            number = work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            both = cpu + sum(
                seconds - server.get(pid, 0.0) for pid, seconds in computed(postgres).items()
            )
            return [1e6 * seconds / number for seconds in (wall, cpu, both)]

        return once

    for work in (ours, peer):
        work()  # statements are compiled, tables and indexes have pages
    found = contest({"ours": timed(ours), "peer": timed(peer)}, rounds=PAIRS)
    for place, name in enumerate(MEASURES):
        both = [[one[place] for one in found[side]] for side in ("ours", "peer")]
        figure = against(
            f"lineage: events {what} in batches, {name}", *both, unit="µs per event",
            goal=Goal(at_most=1.1), detail=detail,
        )  # fmt: skip
        yield explained(figure, ours)


MEASURES = "wall", "CPU of the process", "CPU of the process and PostgreSQL"


def computed(postgres: Postgres) -> dict[str, float]:
    """Return the seconds of processor time of each of the server's processes."""
    master = (postgres.folder / "data" / "postmaster.pid").read_text().splitlines()[0]
    children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    found = {}
    for pid in (master, *children):
        with suppress(OSError):  # it has ended
            found[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return found


def _stage(engine: Engine, outbox: Outbox) -> int:
    """Stage events with their rows; return how many."""
    for _ in range(TRANSACTIONS):
        rows = [{"customer": f"c{n}", "document": BODY} for n in range(BATCH)]
        events = [
            Event(body=BODY, topic="orders", key=f"c{n}", type="OrderPlaced") for n in range(BATCH)
        ]
        with engine.begin() as db:
            db.execute(insert(business), rows)
            outbox.add_all(db, events)
    return TRANSACTIONS * BATCH


def _handle(engine: Engine, lineage: Lineage | None) -> int:
    """Run a consumer until it has handled everything; return how many."""
    count = TRANSACTIONS * BATCH
    broker = connect("memory:", partitions=4)
    broker.create_topic("orders", partitions=4)
    with closing(broker.sink()) as sink:
        sink.publish([
            Message.new("orders", b"{}", key=f"c{n}", type="OrderPlaced", source="shop")
            for n in range(count)
        ])  # fmt: skip
    consumer = Consumer(
        broker, group="bench", database=engine, workers=4, batch=500, backlog=count,
        drain_seconds=5.0, lineage=lineage,
    )  # fmt: skip
    done = itertools.count(1)

    @consumer.on("orders", batch=Batches(size=BATCH, whole=True))
    @idempotent
    def handle(orders: list[dict], session: Session) -> None:  # type: ignore[type-arg]
        session.execute(insert(business), [{"customer": "c", "document": BODY} for _ in orders])
        if count in [next(done) for _ in orders]:
            consumer.stop()  # what runs is committed and acknowledged first

    consumer.run()
    return count
