"""Few events: what relay and consumer cost at 50 events a second and without any, as processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from consuming import Base
from relaying import Place, cpu_of

from figures import Figure, Goal, against, contest
from holdfast.consumer import create_tables
from holdfast.db.engine import open_database
from holdfast.outbox import Outbox
from tests.servers import Kafka, Postgres, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RATE, SECONDS, ROUNDS = 50, 10.0, 3
BODY = b"x" * 300
_SETTLING = 8.0  # seconds after which a relay without events looks at its slowest
_WHAT = {
    "idle": ("relay, {}: CPU without events", "% of a core", 0.5),
    "busy": (f"relay, {{}}: CPU at {RATE} events/s", "% of a core", 4.0),
    "p50": (f"relay, {{}}: commit → consumed p50 at {RATE} events/s", "ms", 5.0),
    "p99": (f"relay, {{}}: commit → consumed p99 at {RATE} events/s", "ms", 20.0),
    "consumer_idle": ("consumer behind {}: CPU without events", "% of a core", 0.5),
    "consumer_busy": (f"consumer behind {{}}: CPU at {RATE} events/s", "% of a core", 4.0),
    "handled_p50": (f"{{}}: commit → handler p50 at {RATE} events/s", "ms", 5.0),
    "handled_p99": (f"{{}}: commit → handler p99 at {RATE} events/s", "ms", 20.0),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What one life of a relay and a consumer showed: percent of a core, and milliseconds."""

    idle: float
    busy: float
    p50: float
    p99: float
    consumer_idle: float
    consumer_busy: float
    handled_p50: float
    handled_p99: float


def figures() -> Iterator[Figure]:
    """Measure both engines in turn; the peer is the promise."""
    with Postgres() as postgres, Kafka() as kafka:
        place = Place(postgres, kafka)
        sides = {kind: partial(measured, place, kind) for kind in ("lease", "wal")}
        for kind, found in contest(sides, ROUNDS).items():
            for which, (what, unit, limit) in _WHAT.items():
                yield against(
                    f"lowtraffic: {what.format(kind)}",
                    [getattr(each, which) for each in found],
                    [limit] * ROUNDS,
                    unit=unit,
                    goal=Goal(at_most=1),
                    detail=f"PostgreSQL → Kafka (confluent), 300 bytes, {SECONDS:g} s, {ROUNDS} "
                    "rounds; `holdfast relay` and a consumer with dedup and effect in PostgreSQL, "
                    "each a process, all its threads; counted from the commit's return to an "
                    "independent consumer or to the handler; the peer is the promise",
                )


def measured(place: Place, kind: str) -> Found:
    """Start a relay and a consumer, leave them alone, then commit events one by one."""
    topic, outbox = place.topic(), Outbox(source="bench")
    arrived: dict[bytes, float] = {}
    till = open_database(place.postgres.database(f"bench_till_{topic.replace('-', '_')}"))
    create_tables(till)
    Base.metadata.create_all(till)

    def add(body: bytes) -> float:
        with place.engine.begin() as db:
            outbox.add(db, body, topic=topic, key=f"key-{len(arrived) % 97}", type="OrderPlaced")
        return time.monotonic()

    def handled() -> dict[int, float]:
        with till.connect() as db:
            rows = db.exec_driver_sql("SELECT number, document FROM entries")
            return {number: float(moment) for number, moment in rows}

    url = till.url.render_as_string(hide_password=False)
    consumer_ = (
        sys.executable, str(Path(__file__).with_name("consuming.py")), "ours", "timed",
        place.kafka.address, url, topic, str(10**9),
    )  # fmt: skip
    with (
        _running(place.relay(kind)) as relay,
        _running(consumer_) as consumer,
        _consuming(place, topic, arrived),
    ):
        add(b"999999")
        wait_until(lambda: b"999999" in arrived and handled(), "both are at work", 120)
        pids = relay.pid, consumer.pid
        time.sleep(_SETTLING)
        idle = _shares(pids, lambda: time.sleep(SECONDS))
        committed: dict[bytes, float] = {}
        busy = _shares(pids, lambda: committed.update(_paced(add)))
        wait_until(lambda: len(arrived) > len(committed), "all were consumed", 60)
        wait_until(lambda: len(handled()) > len(committed), "all were handled", 60)
    place.empty()
    moments = handled()
    till.dispose()
    seen = _waits(committed, arrived)
    own = _waits(committed, {body: moments[int(body[:6])] for body in committed})
    return Found(
        idle[0], busy[0], median(seen), _high(seen), idle[1], busy[1], median(own), _high(own)
    )


def _waits(committed: dict[bytes, float], there: dict[bytes, float]) -> list[float]:
    return sorted((there[body] - moment) * 1000 for body, moment in committed.items())


def _high(waits: list[float]) -> float:
    return waits[int(len(waits) * 0.99)]


def _paced(add: Callable[[bytes], float]) -> Iterator[tuple[bytes, float]]:
    began, count = time.monotonic(), 0
    while time.monotonic() - began < SECONDS:
        body = b"%06d" % count + BODY
        yield body, add(body)
        count += 1
        time.sleep(max(0.0, began + count / RATE - time.monotonic()))


def _shares(pids: tuple[int, ...], work: Callable[[], object]) -> list[float]:
    """Return the percent of a core that each process takes during *work*."""
    before, began = [cpu_of(pid) for pid in pids], time.monotonic()
    work()
    seconds = time.monotonic() - began
    return [100 * (cpu_of(pid) - cpu) / seconds for pid, cpu in zip(pids, before, strict=True)]


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def _consuming(place: Place, topic: str, arrived: dict[bytes, float]) -> Iterator[None]:
    """Note when each message of *topic* arrives, in a thread."""
    ended = threading.Event()

    def consume() -> None:
        with place.consumer(topic) as consumer:
            while not ended.is_set():
                record = consumer.poll(0.2)
                if record is not None and record.error() is None:
                    arrived[record.value() or b""] = time.monotonic()

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
