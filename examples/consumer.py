"""A consumer from end to end, on SQLite: run me with `python examples/consumer.py`.

Keys keep their order, a duplicate has no second effect, a poison message holds only its own key,
an outage burns no attempt, and many messages share one transaction.
"""

import tempfile
from pathlib import Path

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from holdfast import (
    Backoff,
    Batches,
    CircuitPolicy,
    Consumer,
    Message,
    PoisonMessage,
    circuit,
    connect,
    dead_letter,
    idempotent,
    open_database,
    retry,
)
from holdfast.consumer import ParkingAdmin, create_tables
from holdfast.db.audit import Operator

tables = MetaData()
bills = Table(
    "bills", tables, Column("id", Integer, primary_key=True), Column("who", String(20)),
    Column("number", Integer),
)  # fmt: skip
entries = Table(
    "entries", tables, Column("id", Integer, primary_key=True), Column("who", String(20))
)


class Order(msgspec.Struct):
    """What the messages carry."""

    who: str
    number: int
    cents: int = 100


class Bank:
    """The dependency; it fails as many calls as it is told to."""

    down_for = 0

    def charge(self, order: Order) -> None:
        if self.down_for:
            self.down_for -= 1
            raise ConnectionError("the bank does not answer")


bank = Bank()


def billing(broker: str, engine: Engine) -> Consumer:
    """Return the consumer that bills orders one by one."""
    consumer = Consumer(broker, group="billing", database=engine, due_seconds=0.1)

    @consumer.on("orders")
    @dead_letter()
    @retry(Backoff(first=0.02, ceiling=0.1, attempts=3))
    @circuit("bank", policy=CircuitPolicy(minimum_calls=4, open_seconds=0.2, permits=1))
    @idempotent
    def bill(order: Order, session: Session) -> None:
        if order.cents < 0:
            raise PoisonMessage(f"order {order.number} of {order.who} has a negative price")
        bank.charge(order)
        session.execute(insert(bills).values(who=order.who, number=order.number))

    return consumer


def bookkeeping(broker: str, engine: Engine) -> Consumer:
    """Return the consumer that enters the same orders in batches."""
    consumer = Consumer(broker, group="books", database=engine)

    @consumer.on("orders", batch=Batches(size=50, wait=0.2, whole=True), ordered=False)
    @dead_letter()
    @idempotent
    def enter(orders: list[Order], session: Session) -> None:
        if any(order.cents < 0 for order in orders):
            raise PoisonMessage("a negative price")
        session.execute(insert(entries), [{"who": order.who} for order in orders])

    return consumer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        broker = f"sqlite:///{Path(folder, 'broker.db')}"
        engine = open_database(f"sqlite:///{Path(folder, 'shop.db')}")
        create_tables(engine)  # in production: holdfast db upgrade
        tables.create_all(engine)
        sink = connect(broker).sink()
        consumer = billing(broker, engine)

        def publish(*orders: Order) -> list[Message]:
            sent = [Message.new("orders", msgspec.json.encode(one), key=one.who) for one in orders]
            sink.publish(sent)
            return sent

        def billed(who: str) -> list[int]:
            with engine.connect() as db:
                mine = select(bills.c.number).where(bills.c.who == who).order_by(bills.c.id)
                return list(db.execute(mine).scalars())

        bank.down_for = 1  # a passing failure
        sent = publish(*(Order(who, number) for number in (1, 2, 3) for who in ("ada", "bob")))
        sink.publish(sent[:1])  # the broker sends one of them twice
        consumer.run(until_idle=True)  # leave until_idle out to keep running
        print(f"in order: ada {billed('ada')}, bob {billed('bob')}")
        print(f"handled {consumer.tally.handled}, duplicates {consumer.tally.duplicates}")

        publish(Order("ada", 4, cents=-1), Order("ada", 5), Order("ada", 6), Order("bob", 4))
        consumer.run(until_idle=True)
        admin = ParkingAdmin(engine)
        (held,) = admin.waiting()
        print(f"poison: key {held.key} is held with {held.parked} parked, bob {billed('bob')}")
        admin.release("billing", "orders", "ada", Operator(actor="ada", reason="4 was cancelled"))
        consumer.run(until_idle=True)
        print(f"released: ada {billed('ada')}")

        bank.down_for = 12  # longer than all the retries of a message
        publish(*(Order("eve", number) for number in (1, 2, 3)))
        dead = consumer.tally.dead_lettered
        consumer.run(until_idle=True)
        print(f"outage: eve {billed('eve')}, {consumer.tally.dead_lettered - dead} dead letters")

        books = bookkeeping(broker, engine)
        books.run(until_idle=True)
        with engine.connect() as db:
            count = db.execute(select(func.count()).select_from(entries)).scalar_one()
        print(f"in batches: {count} entries, {books.tally.dead_lettered} dead letter")
        print(consumer.explain())
        sink.close()
        engine.dispose()


main()
