"""A long time at work: memory, tables and the slot stay as they were, and nothing stands.

Both relay engines and two consumers run as processes, `holdfast relay` and `holdfast consume`,
while a shop commits a steady stream. `HOLDFAST_SOAK_SECONDS` makes the long run shorter.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from holdfast import new_id
from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.outbox import Event, Outbox
from holdfast.testing import settled
from tests.chain.crew import HOLDFAST, Crew
from tests.servers import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Fleet

LONG = float(os.environ.get("HOLDFAST_SOAK_SECONDS", "3600"))
ENGINES, GROUPS = ("lease", "wal"), ("singles", "batches")
TICK, PER_TICK = 0.2, 10
RATE = PER_TICK / TICK  # events a second by each relay
_GROWTH, _SPARE_KB = 1.05, 4096
_REMEMBERED = 300 + 600 + 300  # seconds: the window, until the next pruning, and a slow one
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment."""

    memory: dict[str, int]
    """Resident kB of each process."""
    kept: dict[str, int]
    """Bytes of each outbox and of the log behind the slot, rows of the inbox."""


class Soak:
    """The processes, the shop that keeps them busy, and what was seen of them."""

    def __init__(self, postgres: Postgres, kafka: Kafka, folder: Path) -> None:
        own = new_id()
        self._broker = f"kafka+confluent://{kafka.address}"
        self._topic = f"orders-{own}"
        self._urls = {name: postgres.database(f"{name}-{own}") for name in (*ENGINES, "till")}
        self._engines = {name: open_database(url) for name, url in self._urls.items()}
        self._outbox = Outbox(source="shop")
        self._crew = Crew(
            folder,
            {"ORDERS": self._topic, "TILL_DATABASE": self._urls["till"], "KAFKA": kafka.address},
        )
        self.committed = 0
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Make tables and the topic, start everybody, and return when all are at work."""
        for url in self._urls.values():
            done = self._crew.run("db", "upgrade", "--database", url)
            assert done.returncode == 0, done.stderr
        with self._engines["till"].begin() as db:
            for group in GROUPS:
                columns = "seq bigserial PRIMARY KEY, order_id text NOT NULL"
                db.execute(text(f"CREATE TABLE {group} ({columns})"))
        with closing(connect(self._broker)) as broker:
            broker.create_topic(self._topic, partitions=4)
        for kind in ENGINES:
            self._crew.start(f"relay-{kind}", HOLDFAST, "relay", "--engine", kind,
                             "--database", self._urls[kind], "--broker", self._broker)  # fmt: skip
        for group in GROUPS:
            self._crew.start(group, HOLDFAST, "consume", f"till:{group}")
        for kind in ENGINES:
            self._commit(self._engines[kind])
        settled(self._standing, within=180)

    def work(self, seconds: float) -> None:
        """Commit a steady stream for so long, and look at everybody now and then."""
        began = looked = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            for kind in ENGINES:
                self._commit(self._engines[kind])
            if now - looked >= seconds / 120:
                looked = now
                self.samples.append(self._sample())
                assert not self._crew.ended, self._crew.told()
                self._crew.look()
            time.sleep(max(0.0, now + TICK - time.monotonic()))  # pacing: a rate, not a burst

    def finish(self) -> None:
        """Return when all that was committed has had its effect, once, and everybody ended well."""
        settled(self._standing, within=180)
        for group in GROUPS:
            every, own = self._bookings(group)
            assert every == own == self.committed, f"{group}: {every} effects of {own} orders"
        self._crew.end(*self._crew.names)
        assert not self._crew.ended, self._crew.told()

    def close(self) -> None:
        """Leave neither process nor connection behind."""
        self._crew.close()
        for engine in self._engines.values():
            engine.dispose()

    def _commit(self, engine: Engine) -> None:
        orders = [{"order_id": new_id(), "note": "x" * 250} for _ in range(PER_TICK)]
        events = [
            Event(body=order, topic=self._topic, key=f"key-{n % 97}", type="OrderPlaced")
            for n, order in enumerate(orders, self.committed)
        ]
        with engine.begin() as db:
            self._outbox.add_all(db, events)
        self.committed += len(events)

    def _standing(self) -> dict[str, int]:
        """Return what stands: events that wait, orders without their effect."""
        self._crew.look()
        waiting = "SELECT count(*) FROM holdfast_outbox"
        found = {kind: _value(self._engines[kind], waiting) for kind in ENGINES}
        return found | {group: self.committed - self._bookings(group)[1] for group in GROUPS}

    def _bookings(self, group: str) -> tuple[int, int]:
        with self._engines["till"].connect() as db:
            counted = f"SELECT count(*), count(DISTINCT order_id) FROM {group}"  # noqa: S608
            every, own = db.execute(text(counted)).one()
        return every, own

    def _sample(self) -> Sample:
        size = "SELECT pg_total_relation_size('holdfast_outbox')"
        kept = {f"outbox of {kind}, bytes": _value(self._engines[kind], size) for kind in ENGINES}
        behind = (
            "SELECT coalesce(max(pg_current_wal_lsn() - confirmed_flush_lsn), 0)"
            " FROM pg_replication_slots WHERE database = current_database()"
        )
        kept["log behind the slot, bytes"] = _value(self._engines["wal"], behind)
        kept["inbox, rows"] = _value(self._engines["till"], "SELECT count(*) FROM holdfast_inbox")
        return Sample(self._crew.memory(), kept)


def _value(engine: Engine, query: str) -> int:
    with engine.connect() as db:
        return int(db.execute(text(query)).scalar_one())


@pytest.fixture
def soak(servers: Fleet, tmp_path: Path) -> Iterator[Soak]:
    """Open a soak on servers of its own: others would move its memory and its log."""
    postgres, kafka = servers.open(Postgres), servers.open(Kafka)
    made = Soak(postgres, kafka, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()
        servers.close(kafka)
        servers.close(postgres)


@pytest.mark.timeout(600)
def test_a_short_time_at_work_leaves_nothing_behind(soak: Soak) -> None:
    """The same processes for seconds: every order has its effect once, little is kept."""
    soak.work(8)
    soak.finish()
    _require_little(soak.samples, 8)


@pytest.mark.chaos
@pytest.mark.timeout(LONG + 1200)
def test_an_hour_at_work_leaves_memory_and_tables_as_they_were(
    soak: Soak, record_property: Callable[[str, object], None]
) -> None:
    """After its first quarter no process grows, and what is kept stays bounded."""
    soak.work(LONG)
    soak.finish()
    _require_little(soak.samples, LONG)
    count = len(soak.samples)
    early, late = soak.samples[count // 4 : count // 2], soak.samples[count * 3 // 4 :]
    grown = {}
    for name in late[0].memory:
        before, after = (median(one.memory[name] for one in part) for part in (early, late))
        grown[name] = f"{before / 1024:.1f} → {after / 1024:.1f} MB"
        assert after <= before * _GROWTH + _SPARE_KB, f"{name}: {grown[name]}"
    most = {name: max(one.kept[name] for one in soak.samples) for name in late[0].kept}
    record_property("verdict", f"{soak.committed} orders in {LONG:g} s; {grown}; at most {most}")


def _require_little(samples: list[Sample], seconds: float) -> None:
    """Check that what is published, confirmed or forgotten takes no room."""
    rows = min(seconds, _REMEMBERED) * RATE * len(ENGINES) * len(GROUPS) * 1.2 + 1000
    for name, bound in {
        **{f"outbox of {kind}, bytes": _MOST_BYTES for kind in ENGINES},
        "log behind the slot, bytes": _MOST_BYTES,
        "inbox, rows": rows,
    }.items():
        most = max(one.kept[name] for one in samples)
        assert most <= bound, f"{name}: {most:,} of {bound:,.0f}"
