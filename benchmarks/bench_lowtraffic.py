"""Few events: what a relay costs at 50 events a second and without any, as a process."""

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

from relaying import Place, cpu_of

from figures import Figure, Goal, against, contest
from holdfast.outbox import Outbox
from tests.servers import Kafka, Postgres, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RATE, SECONDS, ROUNDS = 50, 10.0, 3
BODY = b"x" * 300
_SETTLING = 8.0  # seconds after which a relay without events looks at its slowest
_LIMITS = {"idle": 0.5, "busy": 4.0, "p50": 5.0, "p99": 20.0}
_WHAT = {
    "idle": ("CPU without events", "% of a core"),
    "busy": (f"CPU at {RATE} events/s", "% of a core"),
    "p50": (f"commit → consumed p50 at {RATE} events/s", "ms"),
    "p99": (f"commit → consumed p99 at {RATE} events/s", "ms"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What one life of a relay showed: percent of a core, and milliseconds."""

    idle: float
    busy: float
    p50: float
    p99: float


def figures() -> Iterator[Figure]:
    """Measure both engines in turn; the peer is the promise."""
    with Postgres() as postgres, Kafka() as kafka:
        place = Place(postgres, kafka)
        sides = {kind: partial(measured, place, kind) for kind in ("lease", "wal")}
        for kind, found in contest(sides, ROUNDS).items():
            for which, (what, unit) in _WHAT.items():
                yield against(
                    f"lowtraffic: relay, {kind}: {what}",
                    [getattr(each, which) for each in found],
                    [_LIMITS[which]] * ROUNDS,
                    unit=unit,
                    goal=Goal(at_most=1),
                    detail=f"PostgreSQL → Kafka (confluent), 300 bytes, {SECONDS:g} s, {ROUNDS} "
                    "rounds; `holdfast relay` as a process, all its threads; counted from the "
                    "commit's return to an independent consumer; the peer is the promise",
                )


def measured(place: Place, kind: str) -> Found:
    """Start a relay, leave it alone, then commit events one by one."""
    topic, outbox = place.topic(), Outbox(source="bench")
    arrived: dict[bytes, float] = {}

    def add(body: bytes) -> float:
        with place.engine.begin() as db:
            outbox.add(db, body, topic=topic, key=f"key-{len(arrived) % 97}", type="OrderPlaced")
        return time.monotonic()

    with _relay(place, kind) as relay, _consuming(place, topic, arrived):
        add(b"first")
        wait_until(lambda: b"first" in arrived, "the relay is at work", 120)
        time.sleep(_SETTLING)
        idle = _share(relay.pid, lambda: time.sleep(SECONDS))
        committed: dict[bytes, float] = {}
        busy = _share(relay.pid, lambda: committed.update(_paced(add)))
        wait_until(lambda: len(arrived) > len(committed), "all were consumed", 60)
    place.empty()
    waits = sorted((arrived[body] - moment) * 1000 for body, moment in committed.items())
    return Found(idle, busy, median(waits), waits[int(len(waits) * 0.99)])


def _paced(add: Callable[[bytes], float]) -> Iterator[tuple[bytes, float]]:
    began, count = time.monotonic(), 0
    while time.monotonic() - began < SECONDS:
        body = b"%06d" % count + BODY
        yield body, add(body)
        count += 1
        time.sleep(max(0.0, began + count / RATE - time.monotonic()))


def _share(pid: int, work: Callable[[], object]) -> float:
    """Return the percent of a core that process *pid* takes during *work*."""
    before, began = cpu_of(pid), time.monotonic()
    work()
    return 100 * (cpu_of(pid) - before) / (time.monotonic() - began)


@contextmanager
def _relay(place: Place, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    command = (
        str(Path(sys.executable).with_name("holdfast")), "relay", "--engine", kind,
        "--database", place.url, "--broker", f"kafka+confluent://{place.kafka.address}",
    )  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
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
