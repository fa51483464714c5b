"""A real Debezium at its best: tuned, with the JVM's full compiler, on the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from latencies import Commits, Latency, latency
from relaying import ROWS, cpu_of, fill
from sqlalchemy import create_engine, text

from holdfast.outbox import create_tables
from tests.servers import wait_until
from tests.servers.debezium import Debezium, outbox_router

if TYPE_CHECKING:
    from relaying import Place
    from sqlalchemy.engine import Engine

_TUNED = {
    **outbox_router(),
    "slot.drop.on.stop": "false",
    "poll.interval.ms": "5",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
}


@dataclass(frozen=True, slots=True)
class Found:
    """What one life of Debezium showed."""

    rate: float
    """Rows per second from the first to the last record of the backlog, without its start."""
    cpu: float
    """CPU-seconds of its JVM for the backlog, its start included."""
    latency: Latency
    """Of single events, behind the backlog: its code is compiled by then."""


def measured(place: Place) -> Found:
    """Let it make its slot, commit the backlog while it is down, start it again."""
    topic = place.topic()
    name = topic.replace("bench-", "debezium_")
    engine = create_engine(place.postgres.database(name))
    create_tables(engine)
    with (
        Debezium(place.kafka, place.postgres, name, _TUNED, compiled=True) as debezium,
        Commits(engine) as commits,
    ):
        _await_stream(engine, debezium.slot)
        commits.add(topic, b"first")
        place.stamps(topic, 1)
        debezium.stop()
        fill(engine, topic)
        debezium.start()
        stamps = place.stamps(topic, ROWS + 1)[1:]
        cpu = cpu_of(debezium.pid)
        single = place.topic()
        found = Found(
            len(stamps) / ((max(stamps) - min(stamps)) / 1000),
            cpu,
            latency(place, single, lambda body: commits.add(single, body), before=False),
        )
        debezium.stop()
    with engine.begin() as db:
        db.execute(text("SELECT pg_drop_replication_slot(:s)"), {"s": debezium.slot})
    engine.dispose()
    return found


def _await_stream(engine: Engine, slot: str) -> None:
    query = text("SELECT active FROM pg_replication_slots WHERE slot_name = :s")

    def active() -> bool:
        with engine.connect() as db:
            return bool(db.execute(query, {"s": slot}).scalar())

    wait_until(active, "Debezium streams", 60)
