"""Version 2.3.1 of the notification service: who pays as a guest has an address, too."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session  # noqa: TC002 - the handler's annotation is resolved

from holdfast import Backoff, Consumer, Outbox, dead_letter, idempotent, retry
from holdfast.tracing import Lineage

lineage = Lineage("notification")
outbox = Outbox(source="notification", lineage=lineage)
consumer = Consumer(
    "sqlite:///broker.db",
    group="notification",
    database="sqlite:///notification.db",
    lineage=lineage,
    version="2.3.1",
)


@consumer.on("payments")
@dead_letter()
@retry(Backoff(first=0.05, ceiling=0.1, attempts=2))
@idempotent
def notify(payment: dict[str, Any], session: Session) -> None:
    to = payment["guest"]["email"] if "guest" in payment else payment["customerEmail"]
    outbox.add(session, {"order": payment["orderId"], "to": to}, topic="notifications",
               key=payment["orderId"], type="CustomerNotified")  # fmt: skip
