"""The shop: takes orders, and puts an event beside each, until SIGTERM.

Usage: shop.py NAME

A customer belongs to one shop, which numbers the customer's orders, so the numbers are the
order of the commits. One transaction in five is rolled back, with its event staged.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import msgspec
from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast import new_id
from holdfast.db.engine import open_database
from holdfast.outbox import Outbox

ORDERS = os.environ.get("ORDERS", "orders")
CUSTOMERS = int(os.environ.get("CUSTOMERS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0.1"))
ROLLED_BACK, POISON, PASSING = 0.20, 0.01, 0.05


class OrderPlaced(msgspec.Struct):
    order_id: str
    customer: str
    number: int
    billing: str = "good"
    shipping: str = "good"


tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("order_id", String(64), primary_key=True),
    Column("customer", String(64), nullable=False),
    Column("number", Integer, nullable=False),
    UniqueConstraint("customer", "number"),
)
outbox = Outbox(source="shop")


class ChangedMind(Exception):
    """The customer walks away before the commit."""


def place(session: Session, customer: str, chance: random.Random) -> None:
    """Take the customer's next order."""
    own = orders.c.customer == customer
    last = session.scalar(select(func.coalesce(func.max(orders.c.number), 0)).where(own))
    order = OrderPlaced(new_id(), customer, last + 1, flaw(chance), flaw(chance))
    session.execute(
        insert(orders).values(order_id=order.order_id, customer=customer, number=order.number)
    )
    outbox.add(session, order, topic=ORDERS, key=customer)
    if chance.random() < ROLLED_BACK:
        raise ChangedMind


def flaw(chance: random.Random) -> str:
    """Return what is wrong with an order at one stage."""
    drawn = chance.random()
    return "poison" if drawn < POISON else "passing" if drawn < POISON + PASSING else "good"


def main(name: str) -> None:
    # No event: the main thread may be inside its lock when the signal comes.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    engine, chance = open_database(os.environ["SHOP_DATABASE"]), random.Random(os.getpid())
    while not asked:
        time.sleep(chance.uniform(0, 2 * PAUSE))  # pacing: customers come one by one
        customer = f"{name}-{chance.randrange(CUSTOMERS)}"
        try:
            with Session(engine) as session, session.begin():
                place(session, customer, chance)
        except ChangedMind:
            pass
        except DBAPIError:  # it restarts, or an earlier life of this shop has just committed
            engine.dispose()
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1])
