"""The order without an orchestrator: run me with `python examples/choreography.py`.

Payment, stock and shipping react to each other's events, on SQLite alone. One order goes through,
one cannot be shipped and is undone, and one meets a bug in shipping: the trace names what is
missing, and why.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.orm import Session

from holdfast import sagas, tracing
from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db import open_database
from holdfast.outbox import LeaseEngine, Outbox, Relay
from holdfast.outbox import create_tables as create_outbox_tables
from holdfast.retry import Backoff
from holdfast.sagas import Reactions, StepFailed
from holdfast.tracing import Flow, Lineage, trace

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.tracing import Chain, LineageEvent, Traced

tables = MetaData()
ledger = Table(
    "ledger", tables, Column("id", Integer, primary_key=True), Column("account", String(20)),
    Column("who", String(20)), Column("amount", Integer),
)  # fmt: skip


class OrderPlaced(msgspec.Struct):
    order: str


class StockReserved(msgspec.Struct):
    order: str


class StockReleased(msgspec.Struct):
    order: str


class PaymentProcessed(msgspec.Struct):
    order: str


class PaymentRefunded(msgspec.Struct):
    order: str


class ParcelSent(msgspec.Struct):
    order: str


class ShippingFailed(msgspec.Struct):
    order: str


flow = (
    Flow("order", start=OrderPlaced)
    .leads(OrderPlaced, to=StockReserved, within="10m")
    .leads(StockReserved, to=PaymentProcessed, within="10m")
    .leads(PaymentProcessed, to=(ParcelSent, ShippingFailed), within="1h")
    .leads(ShippingFailed, to=PaymentRefunded, within="10m")
    .leads(ShippingFailed, to=StockReleased, within="10m")
)


def written_by(service: str) -> Outbox:
    """Return the outbox of a service, which writes down what each event came of."""
    return Outbox(source=service, lineage=Lineage(service))


def book(session: Session, account: str, who: str, amount: int) -> None:
    """Write an entry; should the step fail, it is gone again."""
    session.execute(insert(ledger).values(account=account, who=who, amount=amount))


inventory = Reactions("inventory", outbox=written_by("inventory"))


@inventory.on(topic="stock")
def reserve(event: OrderPlaced, session: Session) -> StockReserved:
    book(session, "stock", event.order, 1)
    return StockReserved(event.order)


@inventory.undo(reserve, topic="stock")
def release(event: ShippingFailed, session: Session) -> StockReleased:
    book(session, "stock", event.order, -1)
    return StockReleased(event.order)


payment = Reactions("payment", outbox=written_by("payment"))


@payment.on(topic="payments")
def charge(event: StockReserved, session: Session) -> PaymentProcessed:
    book(session, "money", event.order, 30)
    return PaymentProcessed(event.order)


@payment.undo(charge, topic="payments")
def refund(event: ShippingFailed, session: Session) -> PaymentRefunded:
    book(session, "money", event.order, -30)
    return PaymentRefunded(event.order)


shipping = Reactions(
    "shipping", outbox=written_by("shipping"), retry=Backoff(first=0.05, attempts=2)
)
addresses = {"ann": "1 Main Street", "bob": ""}


@shipping.on(topic="shipments")
def send(event: PaymentProcessed, session: Session) -> ParcelSent:
    if not addresses[event.order]:  # a bug: of cid there is none
        raise StepFailed("no such address", event=ShippingFailed(event.order))
    book(session, "parcels", event.order, 1)
    return ParcelSent(event.order)


READS = {
    inventory: ("orders", "shipments"),
    payment: ("stock", "shipments"),
    shipping: ("payments",),
}


def balance(engine: Engine, who: str) -> str:
    """Return what stands in the books for *who*."""
    total = func.sum(ledger.c.amount)
    wanted = select(ledger.c.account, total).where(ledger.c.who == who).group_by(ledger.c.account)
    with engine.connect() as db:
        return ", ".join(f"{account} {amount}" for account, amount in sorted(db.execute(wanted)))


def shown(chain: Chain, event: LineageEvent, depth: int = 1) -> None:
    """Print *event* and all that came of it."""
    print(f"{'  ' * depth}{event.type}, by {event.source}")
    for one in sorted(chain.children(event), key=lambda one: one.type):
        shown(chain, one, depth + 1)


def has_settled(found: Traced) -> bool:
    """Whether nothing more will happen: all is there, or something is a dead letter."""
    return not found.missing or any(one.failures for one in found.chain.events)


def main(folder: Path) -> None:
    """Run the services, place three orders, and tell what came of each."""
    engine = open_database(f"sqlite:///{folder}/shop.db")
    for create in (create_consumer_tables, create_outbox_tables, tables.create_all):
        create(engine)
    sagas.create_tables(engine)
    tracing.create_tables(engine)
    broker = connect(f"sqlite:///{folder}/broker.db")
    for topic in ("orders", "stock", "payments", "shipments"):
        broker.create_topic(topic, partitions=2)
    relay = Relay(LeaseEngine(engine, broker.sink()))
    consumers = []
    for service, topics in READS.items():
        consumer = Consumer(
            broker, group=service.service, database=engine, lineage=Lineage(service.service)
        )
        for topic in topics:
            service.attach(consumer, topic)
        consumers.append(consumer)
    shop = written_by("shop")
    with ExitStack() as closing:
        for one in (relay, *consumers):
            thread = threading.Thread(target=one.run)
            thread.start()
            closing.callback(thread.join)
            closing.callback(one.stop)
        for who in ("ann", "bob", "cid"):
            with Session(engine) as session, session.begin():
                placed = shop.add(session, OrderPlaced(who), topic="orders", key=who)
            while not has_settled(found := trace([engine], placed.id, flow=flow)):
                threading.Event().wait(0.05)
            print(f"{who}: {balance(engine, who)}")
            shown(found.chain, found.chain.roots[0])
            for missing in found.missing:
                print(f"  missing: {' or '.join(missing.any_of)}: {missing.why}")
    broker.close()
    engine.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
