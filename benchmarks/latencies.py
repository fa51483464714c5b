"""From commit to consumer, one event at a time."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Producer
from profiles import top
from relaying import PAYLOAD, WIRE

from holdfast.message import Message
from holdfast.outbox import Event, Outbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from relaying import Place
    from sqlalchemy.engine import Engine

EVENTS = 400
_WARM = 20
_RELAY = """
import cProfile, sys
from sqlalchemy import create_engine
from holdfast.brokers.kafka import KafkaBroker
from holdfast.outbox import LeaseEngine, Relay
from holdfast.outbox.wal import WalEngine
from holdfast.concurrency import signals_heard
from holdfast.urls import BrokerUrl
kind, database, broker, profile = sys.argv[1:]
sink = KafkaBroker(BrokerUrl.parse(broker)).sink()
relay = Relay({"wal": WalEngine, "lease": LeaseEngine}[kind](create_engine(database), sink))
with signals_heard(lambda _: relay.stop()):
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(relay.run)
        profiler.dump_stats(profile)
    else:
        relay.run()
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Latency:
        """Return the quantiles of *seconds*."""
        cuts = statistics.quantiles(seconds, n=100)
        return cls(cuts[49] * 1000, cuts[98] * 1000)


def relayed(place: Place, kind: str, profile: str = "") -> Latency:
    """Measure a relay in a process of its own; its profile is left in the file *profile*."""
    topic, broker = place.topic(), f"kafka+confluent://{place.kafka.address}"
    process = subprocess.Popen([sys.executable, "-c", _RELAY, kind, place.url, broker, profile])
    try:
        with Commits(place.engine) as commits:
            return latency(place, topic, lambda body: commits.add(topic, body), before=False)
    finally:
        process.terminate()
        process.wait(30)
        place.empty()


def relay_profile(place: Place, kind: str) -> str:
    """Return where the relay's own process spends its time during such a measurement."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "profile"))
        relayed(place, kind, file)
        return f"profile of the relay's main thread: {top(file)}"


def produced(place: Place) -> Latency:
    """Measure the floor: the raw producer, without database and relay."""
    topic = place.topic()
    producer = Producer(place.client(**{"linger.ms": 0, "enable.idempotence": True}))

    def send(body: bytes) -> None:
        producer.produce(topic, body, b"key", headers=WIRE)
        producer.poll(0)

    found = latency(place, topic, send, before=True)
    producer.flush()
    return found


def published(place: Place) -> Latency:
    """Measure what the adapter adds: one event at a time through it, from memory."""
    topic, sink = place.topic(), place.broker.sink()

    def send(body: bytes) -> None:
        sink.publish([Message.new(topic, body, key="key", source="shop")])

    try:
        return latency(place, topic, send, before=True)
    finally:
        sink.close()


def latency(place: Place, topic: str, send: Callable[[bytes], None], *, before: bool) -> Latency:
    """Send events one by one; count from the call (*before*) or from its return."""
    sent: dict[bytes, float] = {}
    seen: dict[bytes, float] = {}

    def write() -> None:
        for n in range(EVENTS + _WARM):
            body = b"%06d" % n + PAYLOAD.encode()
            start = time.perf_counter()
            send(body)
            sent[body] = start if before else time.perf_counter()
            time.sleep(0.004)  # pacing: each event alone, not in a batch

    with place.consumer(topic) as consumer:
        send(b"warm")
        while consumer.poll(1.0) is None:
            pass
        writer = threading.Thread(target=write)
        writer.start()
        until = time.monotonic() + 120
        while len(seen) < EVENTS + _WARM and time.monotonic() < until:
            record = consumer.poll(0.5)
            if record is not None and record.error() is None:
                seen[record.value() or b""] = time.perf_counter()
        writer.join()
    return Latency.of([seen[body] - sent[body] for body in sorted(sent)][_WARM:])


class Commits:
    """Commits one event at a time on one connection."""

    def __init__(self, engine: Engine) -> None:
        self._db = engine.connect()
        self._outbox = Outbox(source="shop")

    def add(self, topic: str, body: bytes) -> None:
        """Commit one event."""
        self._outbox.add_all(self._db, [Event(body=body, topic=topic, key="key")])
        self._db.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
