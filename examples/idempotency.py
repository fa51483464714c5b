"""Effects that happen once: run me with `python examples/idempotency.py`.

A broker sends every third message twice, one handler crashes in the middle, and one message
is poison. The books are right all the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.orm import Session

from holdfast import IdempotencyConflict, Message, PoisonMessage, idempotent, open_database
from holdfast.idempotency import BatchRunner, InboxBatch, create_tables

tables = MetaData()
invoices = Table(
    "invoices", tables, Column("id", Integer, primary_key=True), Column("order_id", String(64))
)
crashes = ["in the middle of the first order"]


@idempotent(window="14d")
def bill(order: Message, session: Session) -> None:
    session.execute(insert(invoices).values(order_id=order.id))
    if crashes:
        raise ConnectionError(f"crashed {crashes.pop()}")


def bill_in_batch(session: Session, order: Message) -> None:
    session.execute(insert(invoices).values(order_id=order.id))
    if order.payload == b"poison":
        raise PoisonMessage("an order without a total")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_database(f"sqlite:///{Path(folder, 'shop.db')}")
        create_tables(engine)
        tables.create_all(engine)

        def billed() -> int:
            with engine.connect() as db:
                return db.execute(select(func.count()).select_from(invoices)).scalar_one()

        orders = [Message.new("orders", b"{}") for _ in range(9)]
        deliveries = orders + orders[::3]
        for order in deliveries:
            while True:
                try:
                    with Session(engine) as session, session.begin():
                        bill(order, session)
                    break
                except ConnectionError as error:
                    print(f"{error}: nothing was written, it is delivered again")
        print(f"{len(deliveries)} deliveries of {len(orders)} orders: {billed()} invoices")

        with Session(engine) as session:
            try:
                bill(orders[0].with_(payload=b'{"total": 1}'), session)
            except IdempotencyConflict as error:
                print(f"refused: digest {error.known} then, {error.given} now")

        batch = [Message.new("orders", b"poison" if n == 50 else b"{}") for n in range(100)]
        outcomes = BatchRunner(engine).run(
            InboxBatch(consumer="bill", messages=batch), bill_in_batch
        )
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        print(f"a batch of {len(batch)}: {billed() - len(orders)} invoices, failed: {failed}")
        engine.dispose()


main()
