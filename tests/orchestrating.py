"""A shop whose orders are sagas: real tables, outbox, broker and handlers, one message at a time.

The test is the network: it decides which message is delivered when, how often, and whether a
timer is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select, update
from sqlalchemy.orm import Session

from holdfast import outbox
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.consumer import Consumer
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db import open_database
from holdfast.outbox import LeaseEngine, Relay
from holdfast.sagas import Participant, Saga, SagaResult, Sagas, StepFailed, create_tables
from holdfast.sagas.schema import history, timer
from holdfast.testing import Violation

if TYPE_CHECKING:
    from holdfast import Message
    from holdfast.consumer import HandlerOutcome

_tables = MetaData()
effects = Table(
    "shop_effects",
    _tables,
    Column("seq", Integer, primary_key=True),
    Column("what", String(40)),
    Column("owner", String(40)),
    Column("amount", Integer),
)


class OrderState(msgspec.Struct, frozen=True):
    order: str
    amount: int = 10
    reservation: str = ""
    notes: tuple[str, ...] = ()


class ReserveStock(msgspec.Struct):
    order: str


class StockReserved(msgspec.Struct):
    reservation: str


class ReleaseStock(msgspec.Struct):
    order: str


class Charge(msgspec.Struct):
    order: str
    amount: int


class Refund(msgspec.Struct):
    order: str
    amount: int


class Ship(msgspec.Struct):
    order: str


FAST = Backoff(first=0.001, ceiling=0.002, attempts=2)


def order_saga(version: int = 1) -> Saga[OrderState]:
    """Return the saga: stock and payment side by side, then the shipment."""
    order = Saga("order", state=OrderState, version=version)

    with order.parallel():

        @order.command("inventory", compensate="release_stock", timeout="30s", retry=FAST)
        def reserve_stock(state: OrderState) -> ReserveStock:
            return ReserveStock(state.order)

        @order.command("payment", compensate="refund", timeout="30s", retry=FAST)
        def charge(state: OrderState) -> Charge:
            return Charge(state.order, state.amount)

    @order.reply(reserve_stock)
    def stock_reserved(state: OrderState, reply: StockReserved) -> OrderState:
        return msgspec.structs.replace(state, reservation=reply.reservation)

    @order.compensation("inventory", retry=FAST)
    def release_stock(state: OrderState) -> ReleaseStock:
        return ReleaseStock(state.order)

    @order.compensation("payment", retry=FAST)
    def refund(state: OrderState) -> Refund:
        return Refund(state.order, state.amount)

    @order.command("shipping", compensate=None, timeout="30s", retry=FAST)
    def ship(state: OrderState) -> Ship:
        return Ship(state.order)

    return order


class Shop:
    """The participants' tables, the sagas, and the network between them."""

    def __init__(self, url: str, *sagas: Saga[Any]) -> None:
        self.engine = open_database(url)
        create_consumer_tables(self.engine)
        outbox.create_tables(self.engine)
        create_tables(self.engine)
        _tables.create_all(self.engine)
        self.broker = connect("memory:")
        self.failing: set[tuple[str, str]] = set()
        """Which command of which order fails."""
        self.sagas = Sagas(self.engine, *sagas)
        self.worker = self.sagas.worker()
        self.consumer = Consumer(self.broker, group="shop", database=self.engine)
        self.sagas.attach(self.consumer)
        participant = self._participant()
        for topic in ("inventory", "payment", "shipping"):
            participant.attach(self.consumer, topic)
        for topic in self.consumer.topics:
            self.broker.create_topic(topic, partitions=1)
        self._source = self.broker.source(self.consumer.topics, group="network")

    def _participant(self) -> Participant:
        participant = Participant()

        def effect(session: Session, what: str, order: str, amount: int) -> None:
            values = {"what": what, "owner": order, "amount": amount}
            session.execute(insert(effects).values(values))
            if (what, order) in self.failing:
                raise StepFailed(f"no {what} for {order}")

        @participant.command
        def reserve(command: ReserveStock, session: Session) -> StockReserved:
            effect(session, "stock", command.order, 1)
            return StockReserved(f"r-{command.order}")

        @participant.command
        def release(command: ReleaseStock, session: Session) -> None:
            effect(session, "unstock", command.order, -1)

        @participant.command
        def charge(command: Charge, session: Session) -> None:
            effect(session, "money", command.order, command.amount)

        @participant.command
        def refund(command: Refund, session: Session) -> None:
            effect(session, "refund", command.order, -command.amount)

        @participant.command
        def ship(command: Ship, session: Session) -> None:
            effect(session, "parcel", command.order, 1)

        return participant

    def start(self, saga: Saga[Any], state: Any, key: str) -> Any:
        """Start *saga* in a transaction of its own."""
        with Session(self.engine) as session, session.begin():
            return saga.start(session, state, key=key)

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
        return [self.consumer.handler(one.topic).handle(one) for one in messages]

    def settle(self, *, twice: bool = False) -> None:
        """Deliver and work off everything, until nothing moves any more."""
        for _ in range(50):
            messages = self.published()
            self.deliver(*messages)
            if twice:
                self.deliver(*messages)
            if not messages and not self.worker.step():
                return
        raise Violation("the shop comes to rest", [self.effects()])

    def let_fire(self, kind: str, step: str | None = None) -> int:
        """Make timers of *kind* due, and work them off."""
        due = update(timer).where(timer.c.kind == kind).values(due=0)
        if step is not None:
            due = due.where(timer.c.step == step)
        with self.engine.begin() as db:
            db.execute(due)
        return self.worker.step()

    def result(self, key: str) -> SagaResult:
        """Return how far the saga under *key* is."""
        return self.sagas.result(key)

    def effects(self, order: str | None = None) -> list[tuple[str, str, int]]:
        """Return what stands in the participants' tables, in order."""
        wanted = select(effects.c.what, effects.c.owner, effects.c.amount).order_by(effects.c.seq)
        if order is not None:
            wanted = wanted.where(effects.c.owner == order)
        with self.engine.connect() as db:
            return [(row.what, row.owner, row.amount) for row in db.execute(wanted)]

    def timers(self) -> list[tuple[str, str]]:
        """Return the timers that are set, as (step, kind)."""
        with self.engine.connect() as db:
            found = db.execute(select(timer.c.step, timer.c.kind))
            return sorted((row.step, row.kind) for row in found)

    def told(self, saga_id: str) -> list[dict[str, Any]]:
        """Return the events of a saga's history."""
        wanted = select(history.c.event, history.c.effects).where(history.c.saga_id == saga_id)
        with self.engine.connect() as db:
            rows = db.execute(wanted.order_by(history.c.seq)).all()
        return [
            {"event": msgspec.json.decode(row.event), "effects": msgspec.json.decode(row.effects)}
            for row in rows
        ]

    def close(self) -> None:
        """Let go of everything."""
        self._source.close()
        self.broker.close()
        self.engine.dispose()
