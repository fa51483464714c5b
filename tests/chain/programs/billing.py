"""Stage one: bills each order, and says so by an event of its own."""

import os

import gateway
import msgspec
from shop import ORDERS, OrderPlaced
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert
from sqlalchemy.orm import Session

from holdfast.circuit import CircuitPolicy, circuit
from holdfast.consumer import Attempt, Consumer
from holdfast.db.engine import open_database
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.outbox import Outbox
from holdfast.retry import Backoff, retry

BILLS = os.environ.get("BILLS", "bills")


class OrderBilled(msgspec.Struct):
    order_id: str
    customer: str
    number: int
    shipping: str


tables = MetaData()
bills = Table(
    "bills",
    tables,
    Column("seq", BigInteger, primary_key=True),
    Column("order_id", String(64), nullable=False),  # not unique: a second effect would show
    Column("customer", String(64), nullable=False),
    Column("number", Integer, nullable=False),
)

engine = open_database(os.environ["BILLING_DATABASE"])
consumer = Consumer(
    os.environ["KAFKA"],
    group="billing",
    database=engine,
    backlog=30,  # little, so that partitions are paused and resumed all the time
    takeover_seconds=3,
    revoke_seconds=3,
    due_seconds=0.5,
)


@consumer.on(ORDERS)
@dead_letter()
@retry(Backoff(first=0.1, ceiling=1, attempts=5))
@circuit("payment-gateway", policy=CircuitPolicy(open_seconds=3))
@idempotent(window="14d")
def bill(order: OrderPlaced, session: Session, attempt: Attempt, outbox: Outbox) -> None:
    gateway.call(order.billing, attempt.number)
    session.execute(
        insert(bills).values(order_id=order.order_id, customer=order.customer, number=order.number)
    )
    billed = OrderBilled(order.order_id, order.customer, order.number, order.shipping)
    outbox.add(session, billed, topic=BILLS, key=order.customer)
