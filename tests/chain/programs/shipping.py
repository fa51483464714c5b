"""Stage two: ships what was billed."""

import os

import gateway
import msgspec
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert
from sqlalchemy.orm import Session

from holdfast.circuit import CircuitPolicy, circuit
from holdfast.consumer import Attempt, Consumer
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry

BILLS = os.environ.get("BILLS", "bills")


class OrderBilled(msgspec.Struct):
    order_id: str
    customer: str
    number: int
    shipping: str


tables = MetaData()
shipments = Table(
    "shipments",
    tables,
    Column("seq", BigInteger, primary_key=True),
    Column("order_id", String(64), nullable=False),  # not unique: a second effect would show
    Column("customer", String(64), nullable=False),
    Column("number", Integer, nullable=False),
)

engine = open_database(os.environ["SHIPPING_DATABASE"])
consumer = Consumer(
    os.environ["RABBITMQ"],
    group="shipping",
    database=engine,
    backlog=30,  # little, so that partitions are paused and resumed all the time
    takeover_seconds=3,
    revoke_seconds=3,
    due_seconds=0.5,
)


@consumer.on(BILLS)
@dead_letter()
@retry(Backoff(first=0.1, ceiling=1, attempts=5))
@circuit("carrier", policy=CircuitPolicy(open_seconds=3))
@idempotent(window="14d")
def ship(order: OrderBilled, session: Session, attempt: Attempt) -> None:
    gateway.call(order.shipping, attempt.number)
    session.execute(
        insert(shipments).values(
            order_id=order.order_id, customer=order.customer, number=order.number
        )
    )
