"""`make demo`: an order service, a relay and a consumer, killed at the worst moments.

Everything runs on SQLite in a temporary folder: one file for the shop and its outbox, one
for the bank account, one for the broker. Each part is a process of its own, and the demo
kills them with SIGKILL: in the middle of a transaction, between publishing and deleting,
and between commit and acknowledgement. At the end it counts.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sqlalchemy import Column, Integer, MetaData, String, func, insert, select
from sqlalchemy import Table as SqlTable
from sqlalchemy.orm import Session

from holdfast import Consumer, Outbox, connect, idempotent, open_database
from holdfast.consumer import create_tables as create_consumer
from holdfast.outbox import LeaseEngine, LeaseTerms, Relay
from holdfast.outbox import create_tables as create_outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Engine

    from holdfast import Message
    from holdfast.ports import Broker, Delivery, Published

ORDERS, CUSTOMERS = 200, 12
shop_tables, bank_tables = MetaData(), MetaData()
orders = SqlTable(
    "orders",
    shop_tables,
    Column("id", Integer, primary_key=True),
    Column("customer", String, nullable=False),
    Column("cents", Integer, nullable=False),
)
charges = SqlTable(
    "charges",
    bank_tables,
    Column("seq", Integer, primary_key=True),
    Column("order_id", Integer, nullable=False),  # not unique: a double charge would show
    Column("customer", String, nullable=False),
    Column("cents", Integer, nullable=False),
)


class OrderPlaced(msgspec.Struct):
    order_id: int
    customer: str
    cents: int


PROCESSES = multiprocessing.get_context("forkserver")  # a new one starts in milliseconds
PROCESSES.set_forkserver_preload(["__main__"])


def main() -> int:
    console = Console(highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        os.chdir(folder)
        create_outbox(shop := open_database("sqlite:///shop.db"))
        shop_tables.create_all(shop)
        create_consumer(bank := open_database("sqlite:///bank.db"))
        bank_tables.create_all(bank)
        broker = connect("sqlite:///broker.db")
        broker.create_topic("orders", partitions=4)
        code = show(console, shop, bank, broker)
        broker.close()
    console.print(f"[dim]{time.monotonic() - began:.0f} seconds, no server.[/]")
    return code


def show(console: Console, shop: Engine, bank: Engine, broker: Broker) -> int:
    def waiting() -> int:
        return sum(broker.lag("billing", ["orders"]).values())

    console.rule("[bold]1. A service takes orders; each event commits with its order")
    kills = phase(console, service, "committed", ORDERS, lambda: count(shop, orders))
    console.print(f"   {count(shop, orders)} orders committed, {kills} × SIGKILL mid-transaction")

    console.rule("[bold]2. A relay publishes them, and dies between publish and delete")
    placed = outbox_size(shop)
    kills = phase(console, relay, "published", placed, lambda: placed - outbox_size(shop))
    stored = waiting()
    console.print(f"   {stored} messages on the broker, {kills} × SIGKILL: some are there twice")

    console.rule("[bold]3. A consumer charges customers, and dies between commit and ack")
    kills = phase(console, consumer, "settled", stored, lambda: stored - waiting())
    console.print(f"   {count(bank, charges)} charges made, {kills} × SIGKILL")
    return verdict(console, shop, bank, stored)


def verdict(console: Console, shop: Engine, bank: Engine, published: int) -> int:
    with shop.connect() as a, bank.connect() as b:
        placed = list(a.execute(select(orders.c.id, orders.c.customer).order_by(orders.c.id)))
        made = list(b.execute(select(charges.c.order_id, charges.c.customer, charges.c.seq)))
    handled = {order for order, _, _ in made}
    lost = {order for order, _ in placed} - handled
    phantom = handled - {order for order, _ in placed}
    twice = len(made) - len(handled)
    disorder = sum(out_of_order(made, customer) for customer in {c for _, c in placed})
    table = Table("promise", "observed", "", title="What really happened")
    for name, number, good in [
        ("orders committed", len(placed), None),
        ("messages published (duplicates included)", published, None),
        ("orders handled", len(handled), None),
        ("duplicates absorbed", published - len(placed), None),
        ("lost", len(lost), not lost),
        ("duplicate effects", twice, twice == 0),
        ("effects of rolled-back orders", len(phantom), not phantom),
        ("out of order for a customer", disorder, disorder == 0),
    ]:
        mark = "" if good is None else "[green]✓[/]" if good else "[red]✗ broken[/]"
        table.add_row(name, str(number), mark)
    console.print(table)
    broken = bool(lost or phantom or twice or disorder)
    console.print(
        "[bold red]A promise broke.[/]"
        if broken
        else f"lost = {len(lost)}, duplicate effects = {twice}. Every promise held."
    )
    return int(broken)


def out_of_order(made: list[Any], customer: str) -> int:
    ids = [order for order, who, _ in sorted(made, key=lambda row: row[2]) if who == customer]
    return sum(a > b for a, b in itertools.pairwise(ids))


def phase(
    console: Console, role: Callable[[int], None], what: str, goal: int, reached: Callable[[], int]
) -> int:
    """Start *role* again and again until *goal* is reached; return how often it was killed."""
    kills = 0
    columns = (TextColumn(f"   {what:<9}"), BarColumn(44), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(what, total=goal)
        while (now := reached()) < goal:
            process = PROCESSES.Process(target=part, args=(role, kills))
            process.start()
            while process.is_alive() and (now := reached()) < goal:
                progress.update(bar, completed=now)
                time.sleep(0.05)
            if process.is_alive():
                process.terminate()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                kills += 1
                name = f"{role.__name__} {process.pid}"
                console.print(f"   [red]✗[/] {name} killed at {now}; starting another")
            elif process.exitcode not in (0, -signal.SIGTERM):
                raise SystemExit(f"{role.__name__} failed with exit code {process.exitcode}")
        progress.update(bar, completed=now)
    return kills


def part(role: Callable[[int], None], kills: int) -> None:
    """Be one of the processes; what it logs about its dead predecessors goes to a file."""
    logging.basicConfig(filename="demo.log")
    role(kills)


def count(engine: Engine, table: SqlTable) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def outbox_size(shop: Engine) -> int:
    from holdfast.outbox.schema import outbox

    return count(shop, outbox)


# -- the three processes -------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def service(kills: int) -> None:
    """Place orders; some fail and roll back, and twice the process dies before the commit."""
    engine, outbox = open_database("sqlite:///shop.db"), Outbox(source="shop")
    chance = random.Random(kills)
    made = 0
    while count(engine, orders) < ORDERS:
        with Session(engine) as session:
            customer, cents = f"customer-{chance.randrange(CUSTOMERS)}", chance.randrange(100, 9999)
            order_id = session.execute(
                insert(orders).values(customer=customer, cents=cents).returning(orders.c.id)
            ).scalar_one()
            outbox.add(
                session, OrderPlaced(order_id, customer, cents), topic="orders", key=customer
            )
            made += 1
            if kills < 2 and made == 60:
                die()
            if chance.random() < 0.1:
                session.rollback()  # the payment form was closed: order and event both go
            else:
                session.commit()


class DyingSink:
    """Publishes, then dies before the relay can delete the rows: the worst moment."""

    def __init__(self, sink: Any, batches: int) -> None:
        self._sink, self._left, self.caps = sink, batches, sink.caps

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        results: list[Published] = self._sink.publish(messages)
        self._left -= 1
        if self._left == 0:
            die()
        return results

    def close(self) -> None:
        self._sink.close()


def relay(kills: int) -> None:
    sink = connect("sqlite:///broker.db").sink()
    dying = DyingSink(sink, batches=3 if kills < 3 else 0)
    terms = LeaseTerms(seconds=0.5)  # short, so that the next relay need not wait long
    running = Relay(LeaseEngine(open_database("sqlite:///shop.db"), dying, terms=terms, batch=20))
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    running.run()


def consumer(kills: int) -> None:
    billing = Consumer(
        "sqlite:///broker.db?session=1",
        group="billing",
        database="sqlite:///bank.db",
        takeover_seconds=1.0,  # short, so that the next consumer need not wait long
    )

    @billing.on("orders")
    @idempotent
    def charge(order: OrderPlaced, session: Session) -> None:
        session.execute(
            insert(charges).values(
                order_id=order.order_id, customer=order.customer, cents=order.cents
            )
        )

    if kills < 3:
        die_before_ack(billing, after=40)
    billing.run()


def die_before_ack(billing: Consumer, after: int) -> None:
    """Make the consumer die after *after* commits, before it tells the broker."""
    make = billing.broker.source

    def source(*args: Any, **kwargs: Any) -> Any:
        real = make(*args, **kwargs)
        accept, left = real.accept, [after]

        def dying(deliveries: Sequence[Delivery]) -> None:
            left[0] -= 1
            if left[0] == 0:
                die()
            accept(deliveries)

        real.accept = dying  # type: ignore[method-assign]
        return real

    billing.broker.source = source  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
