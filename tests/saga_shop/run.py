"""One run of the shop: orders come in, processes are killed, and everything is looked at."""

from __future__ import annotations

import gc
import json
import os
import random
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast import outbox
from holdfast.brokers import connect
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.consumer.schema import held, held_key
from holdfast.db import open_database
from holdfast.dlq.store.schema import message as letter
from holdfast.outbox.schema import delayed
from holdfast.outbox.schema import outbox as outbox_table
from holdfast.outbox.schema import parked as parked_events
from holdfast.sagas import create_tables
from holdfast.sagas.operations import SagaOperations
from holdfast.sagas.schema import lock, saga, timer
from tests.chain.crew import HOLDFAST, PROGRAMS, Crew
from tests.saga_shop.books import BALANCE, ITEMS, STOCK, effects, ledger, open_books, totals
from tests.saga_shop.orders import TOPICS, OrderState, fails, order_saga, topic
from tests.saga_shop.verdict import Ending, Observed, judge
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.sagas import Saga

ROOT = Path(__file__).parents[2]
_PROGRAM = "tests.saga_shop.program"
GOING_ON = ("running", "compensating")


@dataclass(slots=True, kw_only=True)
class Shop:
    """Two databases, a broker, and the processes between them, each with a log in *folder*.

    The sagas have one database, the services another: what is between them goes over the broker.
    """

    sagas_url: str
    books_url: str
    broker: str
    folder: Path
    prefix: str
    timeout: str = "5s"
    breaks: str = ""
    customers: int = 20
    crew: Crew = field(init=False)
    engine: Engine = field(init=False)
    books: Engine = field(init=False)
    started: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Make tables, topics and groups, as a deployment does, and start the services."""
        self.engine, self.books = open_database(self.sagas_url), open_database(self.books_url)
        for engine in (self.engine, self.books):
            create_consumer_tables(engine)
            outbox.create_tables(engine)
            create_tables(engine)
        open_books(self.books, [f"c{number}" for number in range(self.customers)])
        broker = connect(self.broker)
        for name in TOPICS:
            broker.create_topic(topic(self.prefix, name), partitions=2)
            broker.create_group(topic(self.prefix, name), self._group(name))
        broker.close()
        environment = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{PROGRAMS}", "SHOP_PREFIX": self.prefix,
            "SHOP_SAGAS": self.sagas_url, "SHOP_BOOKS": self.books_url,
            "SHOP_BROKER": self.broker, "SHOP_TIMEOUT": self.timeout, "SHOP_VERSIONS": "1",
            "SHOP_BREAK": self.breaks, "SHOP_PAGER": str(self.pager),
            "HOLDFAST_BROKER": self.broker,
        }  # fmt: skip
        self.crew = Crew(self.folder, environment)
        relay = (HOLDFAST, "relay", "--lease", "3s", "--database")
        self.crew.start("relay-sagas", *relay, self.sagas_url)
        self.crew.start("relay-books", *relay, self.books_url)
        for number in range(2):
            self.crew.start(f"services-{number}", HOLDFAST, "consume", f"{_PROGRAM}:services")

    def run_sagas(self, name: str, *, versions: str = "1", moves: bool = False) -> None:
        """Start an orchestrator that knows *versions*; with *moves* the newest takes over."""
        told = [f"SHOP_VERSIONS={versions}", *(["SHOP_MOVES=1"] if moves else [])]
        self.crew.start(
            name, "/usr/bin/env", *told, HOLDFAST, "saga", "run", f"{_PROGRAM}:sagas",
            "--group", self._group("replies"),
        )  # fmt: skip

    @property
    def pager(self) -> Path:
        """The file to which the pager writes."""
        return self.folder / "pager"

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return the version and the status of each saga, by its key."""
        found = SagaOperations(self.engine).list(limit=100_000)
        return {one.key: (one.version, one.status) for one in found}

    def order(self, name: str, saga_: Saga[OrderState]) -> None:
        """Let an order come in."""
        customer = f"c{len(self.started) % self.customers}"
        with Session(self.engine) as session, session.begin():
            saga_.start(session, saga_.state(name, customer), key=name)
        self.started.append(name)

    def going_on(self) -> int:
        """Return how many sagas have neither ended nor been parked."""
        return self._count(self.engine, saga, saga.c.status.in_(GOING_ON))

    def effects(self) -> int:
        """Return how much was done and undone so far."""
        return self._count(self.books, effects)

    def observed(self) -> Observed:
        """Return what there is now, and what still stands where."""
        left, balance = totals(self.books)
        operations = SagaOperations(self.engine)
        endings = {
            one.key: Ending(status=one.status, reason=one.reason)
            for one in operations.list(limit=100_000)
        }
        for key, ending in endings.items():
            if ending.status == "parked":
                parked = operations.show(key).parked
                endings[key] = Ending(status="parked", reason=ending.reason, parked=parked)
        return Observed(
            started=self.started,
            sagas=endings,
            ledger=ledger(self.books),
            missing_stock=ITEMS * STOCK - left,
            missing_money=self.customers * BALANCE - balance,
            standing=self.standing(),
        )

    def standing(self) -> dict[str, int]:
        """Return what stands where; the broker is asked once the databases are clean."""
        found = {"sagas that go on": self.going_on()}
        is_over = exists().where(saga.c.id == lock.c.saga_id, saga.c.active_key.is_(None))
        found["locks of sagas that have ended"] = self._count(self.engine, lock, is_over)
        own = saga.c.id == timer.c.saga_id
        rests = or_(saga.c.active_key.is_(None), saga.c.status == "parked")
        found["timers of sagas that rest"] = self._count(
            self.engine, timer, exists().where(and_(own, rests))
        )
        for name, engine in (("sagas", self.engine), ("services", self.books)):
            for table in (outbox_table, delayed, parked_events, held, held_key):
                found[f"{name}, {table.name}"] = self._count(engine, table)
            pending = letter.c.state == "pending"
            found[f"{name}, open dead letters"] = self._count(engine, letter, pending)
        if not any(found.values()):
            for group in ("services", "sagas"):
                found[f"lag of {group}"] = self._lag(f"{self.prefix}-{group}")
        return found

    def settle(self, within: float) -> float:
        """Wait until nothing stands anywhere; return the seconds it took, *within* at most."""
        began = time.monotonic()
        while True:
            self.crew.look()
            took = time.monotonic() - began
            if took > within or not any(self.standing().values()):
                return took
            time.sleep(0.2)  # pacing: of looks at the tables

    def report(self, broken: Sequence[str]) -> str:
        """Return what is wrong, and what the processes have to say."""
        return "\n".join(
            ["the shop is broken:", *broken[:40], *self.crew.ended, "", self.crew.told()]
        )

    def close(self) -> None:
        """Leave no process behind."""
        self.crew.close()
        self.engine.dispose()
        self.books.dispose()

    def _group(self, name: str) -> str:
        return f"{self.prefix}-sagas" if name == "replies" else f"{self.prefix}-services"

    def _lag(self, group: str) -> int:
        """Return what *group* has not settled, as the command says it."""
        read = [topic(self.prefix, name) for name in TOPICS if self._group(name) == group]
        topics = [word for name in read for word in ("--topic", name)]
        args = ("lag", *topics, "--broker", self.broker, "--group", group, "--window", "1s",
                "--json")  # fmt: skip
        with warnings.catch_warnings():
            # A command leaves its connections to the end of its process.
            warnings.simplefilter("ignore", ResourceWarning)
            done = shell(*args)
            gc.collect()
        assert done.stdout, done.stderr
        return sum(lane["lag"] for lane in json.loads(done.stdout))

    def _count(self, engine: Engine, table: Any, *conditions: Any) -> int:
        wanted = select(func.count()).select_from(table).where(*conditions)
        with engine.connect() as db:
            return int(db.execute(wanted).scalar_one())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """So many orders, so many kills while they come in, at most so many at a time."""

    orders: int
    kills: int
    at_once: int = 36
    seed: int = 18
    patience: float = 120.0
    """How many seconds the orders may take to come in, and the kills to happen."""
    bound: float = 90.0
    """How many seconds after the last fault everything must be at rest."""


def names(number: int) -> list[str]:
    """Return the names of *number* orders; every twelfth that fails late is never refunded."""
    found = []
    for one in range(number):
        late = not fails("stock", f"o{one}") and not fails("money", f"stubborn-{one}")
        stubborn = one % 12 == 1 and late
        found.append(f"stubborn-{one}" if stubborn else f"o{one}")
    return found


def killed(shop: Shop, plan: Plan, *, place: Callable[[str], None]) -> tuple[list[str], str]:
    """Let orders come in while processes are killed; return what is broken, and a summary."""
    chance = random.Random(plan.seed)
    coming = names(plan.orders)
    # Kills are spread over the work, not over the time: whatever is slow, they hit it.
    # An order has two effects or more, as 30 % fail at each step and are undone.
    due = [plan.orders * 2 * one // (plan.kills + 2) for one in range(1, plan.kills + 1)]
    began = time.monotonic()
    while coming or (due and shop.going_on()):
        if time.monotonic() - began > plan.patience:
            break
        for _ in range(plan.at_once - shop.going_on() if coming else 0):
            if coming:
                place(coming.pop(0))
        if due and shop.effects() >= due[0]:
            due.pop(0)
            shop.crew.kill(chance.choice(shop.crew.names))
        time.sleep(0.05)  # pacing: of looks at the tables
    came_in = time.monotonic() - began
    took = shop.settle(plan.bound)
    observed = shop.observed()
    broken = [*judge(observed), *shop.crew.ended]
    counts: dict[str, int] = {}
    for ending in observed.sagas.values():
        counts[ending.status] = counts.get(ending.status, 0) + 1
    return broken, (
        f"{len(observed.started)} orders: {counts}; {shop.crew.kills} processes killed in "
        f"{came_in:.1f} s, at rest {took:.1f} s after the last"
    )


def orders_of(shop: Shop, version: int = 1) -> Callable[[str], None]:
    """Return what places an order of *version*."""
    definition = order_saga(shop.prefix, version, timeout=shop.timeout)
    return lambda name: shop.order(name, definition)
