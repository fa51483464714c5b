"""One run of the effect-once checker: duplicates, poison, kills, a rebalance, then the verdict."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import create_tables
from holdfast.consumer.schema import held, held_key
from holdfast.db.engine import open_database
from holdfast.dlq import close
from holdfast.dlq.store.schema import message as letters
from holdfast.idempotency.schema import attempt, start
from holdfast.testing import Violation, WaitTimeout, settled, wait_until
from tests.effects.worker import GROUP, TOPIC, effects, metadata

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.schema import Table

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Verdict:
    """What really happened."""

    missing: list[int]
    twice: list[int]
    phantom: list[int]
    disorder: list[str]
    dead: list[int]
    wanted_dead: list[int]
    left: int
    handled_by: int

    @property
    def clean(self) -> bool:
        """Whether every promise held."""
        broken = self.missing or self.twice or self.phantom or self.disorder or self.left
        return not broken and self.dead == self.wanted_dead


@dataclass(slots=True, kw_only=True)
class Run:
    """What is published, and how the consumers are treated meanwhile."""

    broker: str
    database: str
    native: dict[str, Any] = field(default_factory=dict)
    count: int = 600
    keys: int = 40
    kills: int = 1
    deadly: int = 0
    sabotage: str = ""
    """What breaks a promise on purpose: the run ends when the broker has nothing left."""
    deadline: float = 120.0
    """Seconds within which all that was published is handled or dead, and nothing is left."""
    partitions: int = 4
    batch: int = 0
    """How many messages share a transaction; 0: each has its own."""

    def go(self) -> Verdict:
        """Publish, consume with two processes, kill, and judge."""
        engine = open_database(self.database)
        create_tables(engine)
        metadata.create_all(engine)
        orders = self._orders()
        stream = self._stream(orders)
        # A fast process must leave something for those that come after it.
        last = len(stream) // 10 if self.kills else 0
        self._publish(stream[: len(stream) - last])
        workers: list[subprocess.Popen[bytes]] = [self._worker()]
        try:
            try:
                self._strain(engine, orders, workers)
                self._publish(stream[len(stream) - last :])
                settled(lambda: self._standing(engine, orders, workers), within=self.deadline)
            except (WaitTimeout, Violation) as error:
                raise AssertionError(f"{error}; so far: {self._judge(engine, orders)}") from error
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(90)
            return self._judge(engine, orders)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            engine.dispose()

    def _orders(self) -> list[dict[str, Any]]:
        chance = random.Random(self.count)
        kinds = ["poison"] * (self.count // 100) + ["flaky"] * (self.count // 20)
        kinds += ["deadly"] * self.deadly
        kinds += ["good"] * (self.count - len(kinds))
        chance.shuffle(kinds)
        return [
            {"number": n, "key": f"k{chance.randrange(self.keys)}", "kind": kind}
            for n, kind in enumerate(kinds)
        ]

    def _stream(self, orders: list[dict[str, Any]]) -> list[Message]:
        """Return a message of every order, and a tenth of them again, some much later."""
        chance = random.Random(1)
        messages = [
            Message.new(TOPIC, json.dumps(order).encode(), key=order["key"]) for order in orders
        ]
        again = chance.sample(messages, len(messages) // 10)
        late = set(again[::2])
        stream: list[Message] = []
        for message in messages:
            stream.append(message)
            if message in again and message not in late:
                stream.append(message)
        return stream + sorted(late, key=lambda message: message.id)

    def _publish(self, stream: list[Message]) -> None:
        with closing(connect(self.broker, **self.native)) as broker:
            broker.create_topic(TOPIC, partitions=self.partitions)
            broker.source([TOPIC], group=GROUP).close()  # queues keep only what follows
            with closing(broker.sink()) as sink:
                for start in range(0, len(stream), 200):
                    results = sink.publish(stream[start : start + 200])
                    assert not [result.error for result in results if result.error]

    def _strain(
        self,
        engine: Engine,
        orders: list[dict[str, Any]],
        workers: list[subprocess.Popen[bytes]],
    ) -> None:
        """Let a second process join, then kill one after the other as the work goes on."""
        steps = self.kills + 1
        for step in range(1, steps):
            goal = len(orders) * step // (steps + 1)
            wait_until(
                lambda goal=goal: (  # type: ignore[misc]
                    self._look_after(engine, workers) or self._handled(engine) >= goal
                ),
                deadline=self.deadline,
                what=f"{goal} handled before kill {step}",
            )
            if len(workers) < 2:
                workers.append(self._worker())
            victim = workers.pop(0)
            victim.kill()
            victim.wait()
            workers.append(self._worker())

    def _standing(
        self,
        engine: Engine,
        orders: list[dict[str, Any]],
        workers: list[subprocess.Popen[bytes]],
    ) -> dict[str, int]:
        """Return what still stands, by place; the broker is asked last, for it takes longest."""
        self._look_after(engine, workers)
        handled = self._handled(engine)
        with engine.connect() as db:
            found = {"held messages": _rows(db, held), "held keys": _rows(db, held_key)}
            if not self.sabotage:  # with it they may never be
                good = sum(order["kind"] in ("good", "flaky") for order in orders)
                found["messages without effect"] = good - handled
                found["messages that are not dead yet"] = len(orders) - good - _rows(db, letters)
                found["marks of handlers"] = _rows(db, start)
                found["attempts"] = _rows(db, attempt)
        if not any(found.values()):
            with closing(connect(self.broker, **self.native)) as broker:
                found["lag"] = sum(broker.lag(GROUP, [TOPIC]).values())
        return found

    def _look_after(self, engine: Engine, workers: list[subprocess.Popen[bytes]]) -> bool:
        """Discard dead letters as an operator would, and start what died; never done by that."""
        with engine.begin() as db:
            open_ = select(letters.c.dlq_id).where(letters.c.state == "pending")
            ids = list(db.execute(open_).scalars())
            if ids:
                close(db, ids, "discarded", actor="checker", reason="known to be bad")
        for worker in list(workers):
            if worker.poll() is not None:
                assert worker.returncode == -9, f"a consumer ended with {worker.returncode}"
                workers.remove(worker)
                workers.append(self._worker())
        return False

    def _handled(self, engine: Engine) -> int:
        with engine.connect() as db:
            return db.execute(select(func.count(effects.c.number.distinct()))).scalar_one()

    def _judge(self, engine: Engine, orders: list[dict[str, Any]]) -> Verdict:
        with engine.connect() as db:
            made = list(db.execute(select(effects).order_by(effects.c.seq)))
            bodies = list(db.execute(select(letters.c.payload)).scalars())
            left = _rows(db, held) + _rows(db, held_key)
        good = {order["number"] for order in orders if order["kind"] in ("good", "flaky")}
        counts = Counter(row.number for row in made)
        disorder = []
        for key in {order["key"] for order in orders}:
            numbers = [row.number for row in made if row.key == key]
            disorder += [f"{key}: {b} after {a}" for a, b in itertools.pairwise(numbers) if b < a]
        return Verdict(
            missing=sorted(good - set(counts)),
            twice=sorted(number for number, n in counts.items() if n > 1),
            phantom=sorted(set(counts) - good),
            disorder=disorder,
            dead=sorted(json.loads(body)["number"] for body in bodies),
            wanted_dead=sorted(
                order["number"] for order in orders if order["kind"] in ("poison", "deadly")
            ),
            left=left,
            handled_by=len({row.process for row in made}),
        )

    def _worker(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable, "-m", "tests.effects.worker", self.broker, self.database,
                json.dumps(self.native), self.sabotage, str(self.batch),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def _rows(db: Connection, table: Table) -> int:
    return int(db.execute(select(func.count()).select_from(table)).scalar_one())
