"""Three bugs and an outage at 3 a.m.: seen, tried out, replayed, proven; nothing twice or lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select, update
from sqlalchemy.orm import Session  # noqa: TC002 - the handlers' annotation is resolved

from holdfast.brokers import connect
from holdfast.cli import main
from holdfast.cli.migrations import Migrations
from holdfast.consumer import Consumer, effect
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.dlq.replay import Plans
from holdfast.dlq.replay.schema import plan as plan_table
from holdfast.dlq.store.schema import audit as audit_table
from holdfast.dlq.store.schema import message as letters
from holdfast.errors import DependencyDown
from holdfast.idempotency import idempotent
from holdfast.message import Message
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

metadata = MetaData()
bills = Table(
    "bill",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("consumer", String(20)),
    Column("number", Integer),
)


class Order(msgspec.Struct):
    """An order; some lack what the buggy handler takes for granted."""

    number: int
    total: int | None = 1
    country: str | None = "SE"
    items: list[int] | None = None


class Gateway:
    """The payment gateway: down for a while, and deaf in simulations."""

    def __init__(self) -> None:
        self.outages = 0
        self.paid: list[int] = []

    def pay(self, order: Order) -> None:
        """Charge the customer, or say that nobody answers."""
        if self.outages > 0 and order.number % 10 == 7:
            self.outages -= 1
            raise DependencyDown("the payment gateway does not answer")
        self.paid.append(order.number)


GATEWAY = Gateway()
VAT = {"SE": 25, "DE": 19}


@effect
def pay(order: Order) -> None:
    """Charge through the gateway; a simulation skips it."""
    GATEWAY.pay(order)


def price(order: Order) -> int:
    """Return the price; a missing total is the first bug."""
    return order.total * 100  # type: ignore[operator]


def vat(order: Order) -> int:
    """Return the tax; an unknown country is the second bug."""
    return VAT[order.country]  # type: ignore[index]


def weight(order: Order) -> int:
    """Return the weight; an empty list is the third bug."""
    return sum(order.items) // len(order.items) if order.items is not None else 0


class Release:
    """Which version of the service runs."""

    fixed = False


def bill_buggy(order: Order, session: Session) -> None:
    """Bill as version 1 did."""
    price(order)
    vat(order)
    weight(order)
    pay(order)
    session.execute(insert(bills), {"consumer": "billing", "number": order.number})


def bill_fixed(order: Order, session: Session) -> None:
    """Bill as version 2 does."""
    pay(order)
    session.execute(insert(bills), {"consumer": "billing", "number": order.number})


class World:
    """The shop: its database, its broker, two groups that read `orders`, an operator."""

    def __init__(self, database: str, broker: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.database, self.url = database, broker
        # Sixteen workers and the runtime's own threads; SQLite's pool needs no size.
        self._pool = {} if database.startswith("sqlite") else {"pool_size": 20}
        self.engine: Engine = open_database(database)
        Migrations(self.engine).upgrade()
        metadata.create_all(self.engine)
        self.broker = connect(broker)
        self.topic = "orders"
        self.shipped: list[Message] = []
        self._capsys = capsys

    def publish(self, total: int, poison: int) -> None:
        """Publish *total* orders; every tenth or so has one of three flaws."""
        step = total // poison
        flaws: list[dict[str, Any]] = [{"total": None}, {"country": "XX"}, {"items": []}]
        batch = []
        for number in range(total):
            order: dict[str, Any] = {"number": number}
            if number % step == 0:
                order |= flaws[number // step % 3]
            body = msgspec.json.encode(order)
            batch.append(Message.new(self.topic, body, key=f"order-{number}"))
        sink = self.broker.sink()
        for start in range(0, total, 1000):
            results = sink.publish(batch[start : start + 1000])
            assert all(result.error is None for result in results)
        sink.close()

    @contextmanager
    def consuming(self) -> Iterator[None]:
        """Run billing and shipping as they run in production."""
        engines = [open_database(self.database, **self._pool) for _ in range(2)]
        billing = Consumer(self.url, group="billing", database=engines[0])
        shipping = Consumer(self.url, group="shipping", database=engines[1])

        @billing.on(self.topic)
        @dead_letter()
        @idempotent(window="14d")
        def bill(order: Order, session: Session) -> None:
            (bill_fixed if Release.fixed else bill_buggy)(order, session)

        @shipping.on(self.topic)
        @dead_letter()
        @idempotent(window="14d")
        def ship(order: Order, message: Message, session: Session) -> None:
            self.shipped.append(message)

        threads = [threading.Thread(target=c.run) for c in (billing, shipping)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for consumer in (billing, shipping):
                consumer.stop()
            for thread in threads:
                thread.join()
            for consumer in (billing, shipping):
                consumer.broker.close()
            for engine in engines:
                engine.dispose()

    def close(self) -> None:
        """Leave nothing open."""
        self.broker.close()
        self.engine.dispose()

    def cli(self, *args: str) -> tuple[int, str]:
        """Run `holdfast dlq` as the operator does; return exit code and output."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["dlq", *args, "--database", self.database])
        code = ended.value.code
        return int(code or 0), self._capsys.readouterr().out

    def json(self, *args: str) -> Any:
        """Run a command for scripts; return what it printed."""
        return json.loads(self.cli(*args, "--json")[1])

    def count(self, table: Table, *where: Any) -> int:
        """Count rows."""
        with self.engine.connect() as db:
            return int(
                db.execute(select(func.count()).select_from(table).where(*where)).scalar_one()
            )

    def pending(self) -> int:
        """Return how many dead letters wait."""
        return self.count(letters, letters.c.state == "pending")


@pytest.fixture
def kafka_world(postgres: Any, kafka: Any, capsys: pytest.CaptureFixture[str]) -> Iterator[World]:
    """Set the shop up on PostgreSQL and Kafka."""
    world = World(postgres.database("story"), kafka.url, capsys)
    world.topic = f"orders-{os.getpid()}"
    world.broker.create_topic(world.topic, partitions=4)
    yield world
    world.close()


@pytest.fixture
def sqlite_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[World]:
    """Set the shop up on two SQLite files."""
    world = World(
        f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/broker.db?partitions=4", capsys
    )
    yield world
    world.close()


def test_three_bugs_and_an_outage_are_replayed_without_fear(sqlite_world: World) -> None:
    """The whole story, small, on SQLite alone."""
    story(sqlite_world, total=300, poison=60, deadline=120)


def test_the_story_on_postgres_and_kafka(kafka_world: World) -> None:
    """The whole story, small, on the servers of a real shop."""
    story(kafka_world, total=300, poison=60, deadline=120)


@pytest.mark.chaos
def test_the_story_at_full_size_on_sqlite(sqlite_world: World) -> None:
    """Ten thousand orders, a thousand of them poisoned."""
    story(sqlite_world, total=10_000, poison=1_000, deadline=1200)


@pytest.mark.chaos
def test_the_story_at_full_size_on_postgres_and_kafka(kafka_world: World) -> None:
    """The same on the servers of a real shop."""
    story(kafka_world, total=10_000, poison=1_000, deadline=1200)


def story(world: World, *, total: int, poison: int, deadline: float) -> None:
    """Tell it from the first failure to the proof."""

    def until(condition: Callable[[], object], what: str) -> None:
        wait_until(condition, deadline=deadline, what=what, every=0.05)

    Release.fixed = False
    GATEWAY.outages, GATEWAY.paid = 5, []
    world.publish(total, poison)
    with world.consuming():
        # The bugs fill three groups; the outage, handled by its class, fills none.
        until(lambda: world.count(bills) == total - poison, "the good orders are billed")
        until(lambda: world.pending() == poison, "the poisoned ones are dead letters")
        until(lambda: len(world.shipped) == total, "shipping has them all")
        groups = world.json("groups")
        assert len(groups) == 3
        assert sum(group["pending"] for group in groups) == poison
        assert GATEWAY.outages == 0
        assert world.json("stats")["pending"] == poison

        # Simulation: the old handler would fail, the new one passes, and nothing stays of it.
        names = [group["group_id"][:6] for group in groups]
        module = __name__
        assert world.cli("simulate", *names, "--handler", f"{module}:bill_buggy")[0] == 1
        paid = len(GATEWAY.paid)
        predicted = world.json("simulate", *names, "--handler", f"{module}:bill_fixed")
        assert sum(one["passes"] for one in predicted) == poison
        assert not any(one["fails_alike"] or one["fails_anew"] for one in predicted)
        assert (len(GATEWAY.paid), world.count(bills)) == (paid, total - poison)

        # Too early: the handler is still broken, and only the canary of five learns it.
        send = ("--broker", world.url, "--yes", "--patience", f"{deadline:.0f}s")
        code, text = world.cli("replay", names[0], *send, "--canary", "5", "--reason", "try")
        assert code == 5, text
        stopped = Plans(world.engine).latest(limit=1)[0]
        assert stopped.sent == 5
        assert world.pending() == poison
        world.cli("plans", "abort", stopped.short, "--reason", "too early")

        # The fix is out. The replay is killed in the middle and resumed.
        Release.fixed = True
        killed = _killed_in_the_middle(world, names, deadline)
        assert 0 < killed.sent < poison
        code, text = world.cli(
            "plans", "resume", killed.short, "--broker", world.url, "--rate", "5000/s",
            "--reason", "went on",
        )  # fmt: skip
        assert code == 0, text

    # The proof: everything confirmed, once, by billing alone; the record is whole.
    with world.engine.connect() as db:
        numbers = db.execute(select(bills.c.number)).scalars().all()
    assert sorted(numbers) == list(range(total))
    assert len(world.shipped) == total
    assert not any(message.is_replay for message in world.shipped)
    assert world.pending() == 0
    assert world.json("groups") == []
    assert world.cli("verify", killed.short)[0] == 0
    code, text = world.cli("audit", "--verify")
    assert code == 0, text

    # Somebody changes the record: it shows.
    with world.engine.begin() as db:
        db.execute(update(audit_table).where(audit_table.c.seq == 2).values(actor="nobody"))
    code, text = world.cli("audit", "--verify")
    assert code == 1
    assert "row 2" in text


def _killed_in_the_middle(world: World, names: list[str], deadline: float) -> Any:
    """Replay in a process of its own, slowly, and kill it hard behind the canary."""
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "dlq", "replay",
               *names, "--database", world.database, "--broker", world.url, "--yes",
               "--canary", "3", "--rate", "2/s", "--patience", f"{deadline:.0f}s",
               "--reason", "fixed in 2"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(
            lambda: world.count(plan_table, plan_table.c.sent > 3, plan_table.c.state != "aborted"),
            deadline=deadline,
            what=f"the replay is under way; it runs: {process.poll() is None}",
        )
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
    return Plans(world.engine).latest(limit=1)[0]
