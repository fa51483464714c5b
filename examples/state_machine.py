"""What an order may become: run me with `python examples/state_machine.py`.

placed → paid → shipped → delivered; it can be cancelled while it is placed or paid. A handler asks
the table; an event that would break it is a dead letter that says what would be allowed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from sqlalchemy import Column, MetaData, String, Table, insert, select, update
from sqlalchemy.orm import Session  # noqa: TC002 - the consumer looks at the annotations

from holdfast import dead_letter, idempotent
from holdfast.consumer import Consumer
from holdfast.sagas import StateMachine

tables = MetaData()
orders = Table(
    "orders", tables, Column("id", String(20), primary_key=True), Column("status", String(20))
)


class Status(StrEnum):
    PLACED = "placed"
    PAID = "paid"
    SHIPPED = "shipped"
    DELIVERED = "delivered"
    CANCELLED = "cancelled"


status = StateMachine(
    "order",
    start=Status.PLACED,
    transitions={
        Status.PLACED: {Status.PAID, Status.CANCELLED},
        Status.PAID: {Status.SHIPPED, Status.CANCELLED},
        Status.SHIPPED: {Status.DELIVERED},
        Status.DELIVERED: set(),
        Status.CANCELLED: set(),
    },
)


class StatusChanged(msgspec.Struct):
    order: str
    to: Status


consumer = Consumer("memory:", group="orders", database="sqlite://")


@consumer.on("order-status")
@dead_letter()
@idempotent()
def change(event: StatusChanged, session: Session) -> None:
    wanted = select(orders.c.status).where(orders.c.id == event.order).with_for_update()
    now = Status(session.execute(wanted).scalar_one())
    session.execute(
        update(orders).where(orders.c.id == event.order).values(status=status.move(now, event.to))
    )


def main() -> None:
    """Move orders, some of them where they may not go."""
    with consumer.for_test(tables=tables) as shop:
        for order in ("ann", "bob"):
            with shop.session() as session, session.begin():
                session.execute(insert(orders).values(id=order, status=status.start))
        for order, to in (
            ("ann", Status.PAID), ("ann", Status.SHIPPED), ("ann", Status.DELIVERED),
            ("bob", Status.PAID), ("bob", Status.CANCELLED), ("bob", Status.SHIPPED),
        ):  # fmt: skip
            handled = shop.send(StatusChanged(order, to), topic="order-status", key=order)
            print(f"{order} → {to}: {handled.error or 'done'}")
    print(status.diagram(), end="")


if __name__ == "__main__":
    main()
