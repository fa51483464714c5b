"""One run of the checker: writers, relays, kills and restarts, then the verdict."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from select import select as select_
from typing import TYPE_CHECKING

from sqlalchemy import func, insert, select, update

from holdfast import BrokerDown
from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.db.sql import statements
from holdfast.outbox import Outbox, create_tables
from holdfast.outbox.parked import EventNotParked, ParkedKeys, ParkedSelection
from holdfast.outbox.schema import shard
from holdfast.testing import Violation, settled, wait_until
from tests.checker.handover import (
    HEIR,
    HEIR_SECONDS,
    UNGUARDED,
    ZOMBIE,
    ZOMBIE_SECONDS,
    hand_over,
)
from tests.checker.standing import Places
from tests.checker.verdict import Standing, Verdict, events_of, judge
from tests.checker.writer import KEYS, TOPIC, counter, metadata

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
HOPELESS = ("cursor", "skipping")
"""Sabotages with which a run may never settle."""
_PATIENCE = 120.0
_BOUND, _HOPELESS = 180.0, 2.0
"""Seconds after the last fault until nothing stands; and where a sabotage lets it stand."""


@dataclass(slots=True)
class Toll:
    """What a run has killed so far."""

    kills: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to put under strain, and how."""

    database: str
    broker: str
    engine: str = "lease"
    writers: int = 3
    relays: int = 2
    seconds: float = 3.0
    lease: float = 1.0
    sabotage: str = ""
    faults: list[Callable[[], None]] = field(default_factory=list)
    """Restarts of servers, spread over the run."""
    toll: Toll = field(default_factory=Toll, init=False)

    def go(self) -> Verdict:
        """Run it and judge what reached the broker."""
        self._prepare()
        relays = self._start_relays()
        if self.sabotage == "cursor":  # it loses what commits while it reads
            select_([relay.stdout for relay in relays], [], [], 60)
        writers = [_child("writer.py", self.database, f"w{n}") for n in range(self.writers)]
        try:
            assert all(writer.stdout and writer.stdout.readline() for writer in writers)
            self._strain(relays)
            for writer in writers:
                writer.terminate()
            assert [writer.wait(120) for writer in writers] == [0] * self.writers
            standing = self._settle(relays)
        finally:
            for process in (*writers, *relays):
                _end(process)
        verdict = self._judge(standing)
        verdict.kills, verdict.restarts = self.toll.kills, self.toll.restarts
        return verdict

    def _prepare(self) -> None:
        engine = open_database(self.database)
        create_tables(engine)
        metadata.create_all(engine)
        with engine.begin() as db:
            db.execute(insert(counter), [{"name": key, "n": 0} for key in KEYS[1:]])
            db.execute(insert(counter), {"name": KEYS[0], "n": 1})
            Outbox().add(db, {"key": KEYS[0], "n": 1}, topic=TOPIC, key=KEYS[0])
        engine.dispose()
        broker = connect(self.broker)
        broker.create_topic(TOPIC, partitions=4)
        broker.source([TOPIC], group="checker").close()  # queues keep only what follows
        broker.close()

    def _start_relays(self) -> list[subprocess.Popen[bytes]]:
        if not self.hands_over:
            return [self._relay() for _ in range(self.relays)]
        zombie = self._relay(self.sabotage, ZOMBIE_SECONDS)
        try:
            heir = hand_over(zombie, self._write_more, lambda: self._relay(HEIR, HEIR_SECONDS))
        except BaseException:
            _end(zombie)
            raise
        return [zombie, heir]

    @property
    def hands_over(self) -> bool:
        """Whether a relay freezes and another takes over, instead of kills."""
        return self.sabotage in (ZOMBIE, UNGUARDED)

    def _write_more(self) -> None:
        """Commit the next events of the first key; return once the lease has run out."""
        engine = open_database(self.database)
        now = statements("holdfast.outbox", engine.dialect.name)["now"]

        def has_lapsed() -> bool:
            with engine.connect() as db:
                last = db.execute(select(func.max(shard.c.until))).scalar_one()
                return float(last) < float(db.execute(now).scalar_one())

        with engine.begin() as db:
            db.execute(update(counter).where(counter.c.name == KEYS[0]).values(n=3))
            for n in (2, 3):
                Outbox().add(db, {"key": KEYS[0], "n": n}, topic=TOPIC, key=KEYS[0])
        wait_until(has_lapsed, deadline=60, what="the lease ran out")
        engine.dispose()

    def _relay(
        self, sabotage: str | None = None, lease: float | None = None
    ) -> subprocess.Popen[bytes]:
        broken = self.sabotage if sabotage is None else sabotage
        seconds = str(self.lease if lease is None else lease)
        return _child("relay.py", self.database, self.broker, self.engine, seconds, broken)

    def _strain(self, relays: list[subprocess.Popen[bytes]]) -> None:
        """Kill relays that are at work, again and again; restart servers in between."""
        chance = random.Random(1)
        for fault in (*self.faults, None):
            self._kill_for_a_while(relays, chance, self.seconds / (len(self.faults) + 1))
            if fault is not None:
                fault()
                self.toll.restarts += 1

    def _kill_for_a_while(
        self, relays: list[subprocess.Popen[bytes]], chance: random.Random, seconds: float
    ) -> None:
        """Go on for *seconds*, and until one was killed: on a slow machine that is later."""
        start, before = time.monotonic(), self.toll.kills
        kills = self.sabotage != "cursor" and not self.hands_over
        while (passed := time.monotonic() - start) < seconds or (
            kills and self.toll.kills == before
        ):
            assert passed < seconds + _PATIENCE, "no relay is at work any more"
            self._replace_dead(relays)
            if kills:
                self._kill_one(relays, chance)
            else:
                time.sleep(0.05)  # pacing: nothing to do here

    def _kill_one(self, relays: list[subprocess.Popen[bytes]], chance: random.Random) -> None:
        working = [r for r in relays if r.stdout and select_([r.stdout], [], [], 0.05)[0]]
        if not working:
            return
        victim = chance.choice(working)
        time.sleep(chance.uniform(0, 0.1))  # pacing: a kill at a moment of no meaning
        self._bury(victim)
        relays[relays.index(victim)] = self._relay()

    def _bury(self, relay: subprocess.Popen[bytes]) -> None:
        """Kill *relay* unless it is dead, and count it if that is what it died of."""
        _end(relay)
        self.toll.kills += relay.returncode == -signal.SIGKILL

    def _settle(self, relays: list[subprocess.Popen[bytes]]) -> Standing:
        """Let the relays finish, the faults being over; return what stands, then end them."""
        engine = open_database(self.database)
        places = Places(engine)
        counts = {"databases that did not answer": 1}

        def standing() -> dict[str, int]:
            nonlocal counts
            self._replace_dead(relays)
            counts = places.counts()
            return counts

        # What the broker refused is released, as an operator would.
        with suppress(EventNotParked):
            by = Operator(actor="c", reason="r")
            ParkedKeys(engine).release(ParkedSelection(topic=TOPIC), by)
        with suppress(Violation):  # the verdict tells
            settled(standing, within=_HOPELESS if self.sabotage in HOPELESS else _BOUND)
        rows = places.rows() if any(counts.values()) else []
        engine.dispose()
        for relay in relays:
            relay.terminate()
            relay.communicate(timeout=120)
        return Standing(counts=counts, rows=rows)

    def _judge(self, standing: Standing) -> Verdict:
        committed = self._committed()
        bodies, unread = self._stored("checker")
        standing = replace(standing, counts={**standing.counts, "unread messages": unread})
        verdict = judge(committed, bodies, standing)
        if verdict.lost:  # is it the broker that has them?
            again, _ = self._stored(f"look-{time.time_ns()}")
            verdict = judge(committed, bodies, replace(standing, stored=set(events_of(again))))
        return verdict

    def _replace_dead(self, relays: list[subprocess.Popen[bytes]]) -> None:
        for place, relay in enumerate(relays):
            if relay.poll() is not None:
                self._bury(relay)
                relays[place] = self._relay()

    def _committed(self) -> dict[str, int]:
        engine = open_database(self.database)
        with engine.connect() as db:
            counts = {name: n for name, n in db.execute(select(counter.c.name, counter.c.n))}  # noqa: C416
        engine.dispose()
        return counts

    def _stored(self, group: str) -> tuple[list[bytes], int]:
        """Read the topic as *group*; return the bodies, and how many messages it could not get."""
        broker = connect(self.broker)
        source = broker.source([TOPIC], group=group)
        bodies: list[bytes] = []
        quiet, unread, until = 0, 1, time.monotonic() + 60
        while quiet < 3 and time.monotonic() < until:
            try:
                batch = source.poll(1000, 0.5)
                source.accept(batch)
            except BrokerDown:
                continue
            bodies += [delivery.body or b"" for delivery in batch]
            unread = sum(source.lag().values()) if source.assignment() else 1
            quiet = 0 if unread or batch else quiet + 1
        source.close()
        broker.close()
        return bodies, unread


def _child(script: str, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / script), *args]
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}  # they import from here, too
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
