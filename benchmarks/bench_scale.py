"""Millions: whether the last of them cost what the first did, and memory stays as it was.

`HOLDFAST_BENCH_SCALE` sets how many, 5,000,000 unless given. Relay and consumer are processes;
what they have done is counted from outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import confluent_kafka
from consuming import Base
from relaying import Place, cpu_of, fill

from figures import Figure, Goal
from holdfast.consumer import create_tables
from holdfast.db.engine import open_database
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MANY = int(os.environ.get("HOLDFAST_BENCH_SCALE", "5000000"))
_AT_ONCE = 500_000
_LOOK_SECONDS = 0.5
_PARTS = 5


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a process at one moment."""

    done: int
    at: float
    cpu: float
    resident_mb: float


def figures() -> Iterator[Figure]:
    """Compare the last fifth with the second: in the first, programs still warm up."""
    with Postgres() as postgres, Kafka() as kafka:
        place = Place(postgres, kafka)
        for kind in ("lease", "wal"):
            looks = drained(place, kind)
            yield from flat(f"relay, {kind}, a backlog of {MANY:,}", looks)
        for kind, what in (("lists", "lists of 200"), ("batch", "batches of 200")):
            looks = consumed(place, kind)
            yield from flat(f"consumer, {what}, {MANY:,} messages and dedup rows", looks)


def flat(name: str, looks: Sequence[Look]) -> Iterator[Figure]:
    """Yield rate, CPU and memory of the last part against those of the second."""
    early, late = part(looks, 1), part(looks, _PARTS - 1)
    detail = (
        f"{MANY:,} of 300 bytes, PostgreSQL and Kafka (confluent); ours is the last fifth, the "
        "peer the second one of the same run"
    )
    rates = [(b.done - a.done) / (b.at - a.at) for a, b in (late, early)]
    costs = [1e6 * (b.cpu - a.cpu) / (b.done - a.done) for a, b in (late, early)]
    sizes = [b.resident_mb for _, b in (late, early)]
    for what, unit, (ours, peer), goal in (
        ("rate", "per second", rates, Goal(at_least=0.9)),
        ("CPU of each", "µs", costs, Goal(at_most=1.1)),
        ("memory", "MB resident", sizes, Goal(at_most=1.1)),
    ):
        yield Figure(
            name=f"scale: {name}: {what}, last fifth / second", ours=ours, peer=peer, unit=unit,
            ratio=round(ours / peer, 3), goal=str(goal), met=goal.met(ours / peer), detail=detail,
        )  # fmt: skip


def part(looks: Sequence[Look], number: int) -> tuple[Look, Look]:
    """Return the first and the last look at a fifth of the work."""
    low, high = (MANY * n // _PARTS for n in (number, number + 1))
    found = [look for look in looks if low <= look.done <= high]
    assert len(found) > 1, f"too few looks between {low} and {high}"
    return found[0], found[-1]


def drained(place: Place, kind: str) -> list[Look]:
    """Let `holdfast relay --once` drain a backlog."""
    topic = place.topic()
    for start in range(0, MANY, _AT_ONCE):
        fill(place.engine, topic, min(_AT_ONCE, MANY - start))
    with place.consumer(topic) as consumer:
        process = subprocess.Popen(
            place.relay(kind, "--once"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        looks = watched(process, partial(_records, consumer, topic))
    place.empty()
    return looks


def consumed(place: Place, kind: str) -> list[Look]:
    """Let a consumer with dedup and effect in PostgreSQL handle a topic."""
    url = place.postgres.database(f"bench_scale_{kind}")
    engine = open_database(url)
    create_tables(engine)
    Base.metadata.create_all(engine)
    topic = place.topic()
    place.produce(topic, MANY)
    program = Path(__file__).with_name("consuming.py")
    command = (sys.executable, str(program), "ours", kind, place.kafka.address, url, topic)
    process = subprocess.Popen((*command, str(MANY)), stdout=subprocess.DEVNULL)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        query = "SELECT coalesce(max(id), 0) FROM entries"
        looks = watched(process, lambda: int(db.exec_driver_sql(query).scalar_one()))
        (entered,) = db.exec_driver_sql("SELECT count(*) FROM entries").one()
    engine.dispose()
    assert entered == MANY, f"{entered} of {MANY} effects"
    return looks


def watched(process: subprocess.Popen[bytes], count: Callable[[], int]) -> list[Look]:
    """Look at *process* until it has ended."""
    looks: list[Look] = []
    while process.poll() is None:
        done = count()
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            cpu = cpu_of(process.pid)
        except (OSError, IndexError):
            continue
        if pages and (not looks or done > looks[-1].done):  # it has not ended, nor only waits
            looks.append(Look(done, time.monotonic(), cpu, pages * 4096 / 1e6))
        time.sleep(_LOOK_SECONDS)  # pacing: looks cost as well
    assert process.returncode == 0, f"it ended with {process.returncode}"
    return looks


def _records(consumer: confluent_kafka.Consumer, topic: str) -> int:
    parts = [confluent_kafka.TopicPartition(topic, number) for number in range(4)]
    return sum(consumer.get_watermark_offsets(one, timeout=10)[1] for one in parts)
