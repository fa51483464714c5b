"""The till: books each order by two consumers, which remember for five minutes what they did."""

import os

import msgspec
from sqlalchemy import BigInteger, Column, MetaData, String, Table, insert
from sqlalchemy.orm import Session

from holdfast.consumer import Consumer
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry

ORDERS = os.environ["ORDERS"]


class OrderPlaced(msgspec.Struct):
    order_id: str
    note: str


tables = MetaData()


def _bookings(name: str) -> Table:
    return Table(
        name,
        tables,
        Column("seq", BigInteger, primary_key=True),
        Column("order_id", String(64), nullable=False),  # not unique: a second effect would show
    )


bookings = {name: _bookings(name) for name in ("singles", "batches")}
engine = open_database(os.environ["TILL_DATABASE"])
singles = Consumer(f"kafka+confluent://{os.environ['KAFKA']}", group="singles", database=engine)
batches = Consumer(f"kafka://{os.environ['KAFKA']}", group="batches", database=engine)


@singles.on(ORDERS)
@dead_letter()
@retry(Backoff(first=0.1, ceiling=1, attempts=5))
@idempotent(window="5m")
def book(order: OrderPlaced, session: Session) -> None:
    session.execute(insert(bookings["singles"]), {"order_id": order.order_id})


@batches.on(ORDERS, batch=50)
@dead_letter()
@retry(Backoff(first=0.1, ceiling=1, attempts=5))
@idempotent(window="5m")
def book_many(order: OrderPlaced, session: Session) -> None:
    session.execute(insert(bookings["batches"]), {"order_id": order.order_id})
