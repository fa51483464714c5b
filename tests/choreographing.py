"""A shop whose services react to each other's events: real tables, outbox, broker, handlers.

The test is the network: it decides which event is delivered when, and how often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.orm import Session

from holdfast import outbox, sagas, tracing
from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db import open_database
from holdfast.outbox import LeaseEngine, Outbox, Relay
from holdfast.sagas import Reactions, StepFailed
from holdfast.testing import Violation
from holdfast.tracing import Flow, Lineage

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast import Message
    from holdfast.consumer import HandlerOutcome

_tables = MetaData()
effects = Table(
    "dance_effects",
    _tables,
    Column("seq", Integer, primary_key=True),
    Column("what", String(40)),
    Column("owner", String(40)),
    Column("amount", Integer),
)


class OrderPlaced(msgspec.Struct):
    order: str
    amount: int = 10


class PaymentProcessed(msgspec.Struct):
    order: str


class PaymentFailed(msgspec.Struct):
    order: str


class PaymentRefunded(msgspec.Struct):
    order: str


class ParcelSent(msgspec.Struct):
    order: str


class ShippingFailed(msgspec.Struct):
    order: str


flow = (
    Flow("order", start=OrderPlaced)
    .leads(OrderPlaced, to=(PaymentProcessed, PaymentFailed), within="10m")
    .leads(PaymentProcessed, to=(ParcelSent, ShippingFailed), within="1h")
    .leads(ShippingFailed, to=PaymentRefunded, within="5m")
)


def happened(session: Session, what: str, order: str, amount: int) -> None:
    """Write an effect."""
    session.execute(insert(effects).values(what=what, owner=order, amount=amount))


def make_tables(engine: Engine) -> None:
    """Make every table that a service needs."""
    create_consumer_tables(engine)
    for one in (outbox, sagas, tracing):
        one.create_tables(engine)
    _tables.create_all(engine)


def payment_service(lineage: Lineage | None, poor: set[str]) -> Reactions:
    """Return what takes the money: not from the *poor*."""
    payment = Reactions("payment", outbox=Outbox(source="payment", lineage=lineage))

    @payment.on(topic="payments")
    def charge(event: OrderPlaced, session: Session) -> PaymentProcessed:
        happened(session, "charged", event.order, event.amount)
        if event.order in poor:
            raise StepFailed("no cover", event=PaymentFailed(event.order))
        return PaymentProcessed(event.order)

    @payment.undo(charge, topic="payments")
    def refund(event: ShippingFailed, session: Session) -> PaymentRefunded:
        happened(session, "refunded", event.order, -10)
        return PaymentRefunded(event.order)

    return payment


def shipping_service(lineage: Lineage | None, unknown: set[str]) -> Reactions:
    """Return what sends parcels: not to those whose address is *unknown*."""
    shipping = Reactions("shipping", outbox=Outbox(source="shipping", lineage=lineage))

    @shipping.on(topic="shipments")
    def send(event: PaymentProcessed, session: Session) -> ParcelSent:
        happened(session, "sent", event.order, 1)
        if event.order in unknown:
            raise StepFailed("no such address", event=ShippingFailed(event.order))
        return ParcelSent(event.order)

    return shipping


class Dance:
    """Payment and shipping on one database, and the network between them."""

    def __init__(self, url: str) -> None:
        self.engine = open_database(url)
        make_tables(self.engine)
        self.broker = connect("memory:")
        self.poor: set[str] = set()
        self.unknown: set[str] = set()
        self.shop = Outbox(source="shop", lineage=Lineage("shop"))
        self.consumers = {
            "payment": self._consumer("payment", ("orders", "shipments")),
            "shipping": self._consumer("shipping", ("payments",)),
        }
        payment = payment_service(Lineage("payment"), self.poor)
        shipping = shipping_service(Lineage("shipping"), self.unknown)
        payment.attach(self.consumers["payment"], "orders")
        payment.attach(self.consumers["payment"], "shipments")
        shipping.attach(self.consumers["shipping"], "payments")
        self._source = self.broker.source(["orders", "payments", "shipments"], group="network")

    def _consumer(self, service: str, topics: tuple[str, ...]) -> Consumer:
        for topic in topics:
            self.broker.create_topic(topic, partitions=1)
        return Consumer(self.broker, group=service, database=self.engine, lineage=Lineage(service))

    def place(self, order: str) -> Message:
        """Place an order in a transaction of its own."""
        with Session(self.engine) as session, session.begin():
            return self.shop.add(session, OrderPlaced(order), topic="orders", key=order)

    def published(self) -> list[Message]:
        """Return what the relay has published since the last look."""
        Relay(LeaseEngine(self.engine, self.broker.sink())).run_once()
        found: list[Message] = []
        while batch := self._source.poll(1000, 0.0):
            self._source.accept(batch)
            found += [delivery.message for delivery in batch]
        return found

    def deliver(self, *messages: Message) -> list[HandlerOutcome]:
        """Let each be handled by whoever reads its topic."""
        return [
            consumer.handler(one.topic).handle(one)
            for one in messages
            for consumer in self.consumers.values()
            if one.topic in consumer.topics
        ]

    def settle(self, *, times: int = 1) -> None:
        """Deliver everything, each event so many *times*, until nothing moves any more."""
        for _ in range(50):
            messages = self.published()
            if not messages:
                return
            for _ in range(times):
                self.deliver(*messages)
        raise Violation("the services come to rest", [self.effects()])

    def effects(self, order: str | None = None) -> list[str]:
        """Return what happened, in order."""
        wanted = select(effects.c.what).order_by(effects.c.seq)
        if order is not None:
            wanted = wanted.where(effects.c.owner == order)
        with self.engine.connect() as db:
            return list(db.execute(wanted).scalars())

    def money(self) -> int:
        """Return what was taken and not given back."""
        with self.engine.connect() as db:
            taken = effects.c.what.in_(["charged", "refunded"])
            return int(db.execute(select(func.sum(effects.c.amount)).where(taken)).scalar() or 0)

    def close(self) -> None:
        """Let go of everything."""
        self._source.close()
        self.broker.close()
        self.engine.dispose()
