"""What the other services of the shop did: a recording, with the ids and times of that afternoon.

Each has written down what it published and handled, as a `Lineage` does. The payments are on the
broker, where the notification service reads them; one of them is of a guest.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from holdfast import Message, connect, consumer, open_database, outbox, tracing
from holdfast.tracing.schema import lineage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Connection

ORDER = [  # type, its cause, milliseconds after 14:22:33, from, and who handled it
    ("OrderCreated", None, 100, "orders", ["payment"]),
    ("PaymentProcessed", 0, 250, "payment", ["inventory", "notification"]),
    ("InventoryReserved", 1, 400, "inventory", ["shipping"]),
    ("ShipmentCreated", 2, 1100, "shipping", []),
    ("CustomerNotified", 1, 1300, "notification", []),
]
TOPICS = {"orders": "orders", "payment": "payments", "inventory": "stock",
          "shipping": "shipments", "notification": "notifications"}  # fmt: skip
GUEST = {"orderId": "order-456", "guest": {"email": "ada@example.com"}}


def began(days_ago: int = 0) -> datetime:
    """Return the last 14:22:33 that is an hour ago, or so many days before it."""
    now = datetime.now(UTC)
    today = now.replace(hour=14, minute=22, second=33, microsecond=0)
    ago = days_ago if today <= now - timedelta(hours=1) else days_ago + 1
    return today - timedelta(days=ago)


def events(correlation: str, first: int, start: datetime) -> list[Message]:
    """Return the five events of an order, numbered from *first*."""
    names = [f"evt-{first + place:03d}" for place in range(len(ORDER))]
    return [
        Message(
            id=name, topic=TOPICS[source], payload=json.dumps(GUEST).encode(), key=b"order-456",
            type=type_, source=source, correlation_id=correlation,
            causation_id=None if cause is None else names[cause],
            time=start + timedelta(milliseconds=after),
        )
        for name, (type_, cause, after, source, _) in zip(names, ORDER, strict=True)
    ]  # fmt: skip


def rows(made: list[Message]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each service wrote down of these events: the service, and a row."""
    for one, (_, _, _, source, handlers) in zip(made, ORDER, strict=False):
        told = {
            "event_id": one.id, "type": one.type, "correlation_id": one.correlation_id,
            "causation_id": one.causation_id, "source": source, "topic": one.topic,
            "message_key": one.key_text, "time": one.time.timestamp(), "error": None,
        }  # fmt: skip
        yield source, {**told, "outcome": "published", "service": source, "at": told["time"]}
        for handler in handlers:
            at = one.time.timestamp() + 0.06
            yield handler, {**told, "outcome": "handled", "service": handler, "at": at}


def recorded(shop: Connection, own: Connection, made: list[Message], *, told: bool = True) -> None:
    """Write what is known of an order into the databases; *told* if its customer was."""
    for service, row in rows(made if told else made[:-1]):
        if service != "notification":
            shop.execute(insert(lineage), row)
        elif told:
            own.execute(insert(lineage), row)


def payment(order: str) -> Message:
    """Return the payment of a customer who has an account."""
    body = {"orderId": order, "customerEmail": f"{order}@example.com"}
    return Message.new("payments", json.dumps(body).encode(), key=order, type="PaymentProcessed",
                       source="payment")  # fmt: skip


def main() -> None:
    """Write the lineage of the past, and put payments on the broker."""
    shop, own = open_database("sqlite:///shop.db"), open_database("sqlite:///notification.db")
    tracing.create_tables(shop)
    for package in (consumer, outbox, tracing):
        package.create_tables(own)
    guest = events("corr-def-456", 101, began())
    with shop.begin() as theirs, own.begin() as ours:
        for day in range(1, 7):
            recorded(theirs, ours, events(f"corr-{day}", 1000 * day, began(day)))
        recorded(theirs, ours, events("corr-abc-123", 1, began()))
        recorded(theirs, ours, guest, told=False)
    broker = connect("sqlite:///broker.db")
    broker.create_topic("notifications", partitions=2)
    broker.create_topic("payments", partitions=2)
    broker.create_group("payments", "notification")
    sink = broker.sink()
    others = [payment(name) for name in ("order-454", "order-455", "order-457", "order-458")]
    sink.publish([*others[:2], guest[1], *others[2:]])
    sink.close()
    broker.close()
    for engine in (shop, own):
        engine.dispose()


if __name__ == "__main__":
    main()
