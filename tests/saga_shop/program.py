"""What the processes of the shop run: `holdfast saga run …:sagas`, `holdfast consume …:services`.

They are told by the environment where the databases and the broker are, which versions of the saga
there are, and which promise to break.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import Any

from sqlalchemy import insert, update
from sqlalchemy.orm import Session  # noqa: TC002 - the consumer looks at the annotations

from holdfast.consumer import Consumer
from holdfast.db import open_database
from holdfast.dlq import dead_letter
from holdfast.dlq.alerts import Command
from holdfast.sagas import (
    Saga,
    Sagas,
    StepFailed,
    WorkerTerms,
    current_step,
    participant,
)
from holdfast.sagas.barrier import BarrierVerdict
from tests.saga_shop.books import accounts, effects, item_of, stock
from tests.saga_shop.orders import (
    CancelShipment,
    Charge,
    OrderState,
    Refund,
    ReleaseStock,
    ReserveStock,
    Ship,
    StockReserved,
    fails,
    moving,
    order_saga,
    share,
    topic,
)

PREFIX = os.environ["SHOP_PREFIX"]
VERSIONS = [int(version) for version in os.environ["SHOP_VERSIONS"].split(",")]

MOVES = "SHOP_MOVES" in os.environ


def definition(version: int) -> Saga[OrderState]:
    """Return the saga, which takes over from the version before if that was said."""
    order = order_saga(PREFIX, version, timeout=os.environ["SHOP_TIMEOUT"])
    return moving(order) if MOVES and version > 1 else order


sagas = Sagas(
    open_database(os.environ["SHOP_SAGAS"]),
    *map(definition, VERSIONS),
    hooks=[Command([shutil.which("tee") or "tee", "-a", os.environ["SHOP_PAGER"]])],
    terms=WorkerTerms(idle_seconds=0.1, lease_seconds=3),
)
services = Consumer(
    os.environ["SHOP_BROKER"], group=f"{PREFIX}-services",
    database=open_database(os.environ["SHOP_BOOKS"]), takeover_seconds=2.0,
)  # fmt: skip


def write(session: Session, what: str, order: str, amount: int) -> None:
    """Write into the ledger; stock is counted as well."""
    session.execute(insert(effects).values(what=what, owner=order, amount=amount))
    if what == "stock":
        counted = stock.c.item == item_of(order)
        session.execute(update(stock).where(counted).values(left=stock.c.left - amount))


def pay(session: Session, order: str, customer: str, amount: int) -> None:
    """Take *amount* from a customer's account."""
    write(session, "money", order, amount)
    own = accounts.c.customer == customer
    session.execute(update(accounts).where(own).values(balance=accounts.c.balance - amount))


def perhaps_fail(what: str, order: str) -> None:
    """Fail after the effect was written: for good, or so that another attempt passes."""
    step = current_step()
    assert step is not None
    if fails(what, order):
        raise StepFailed(f"no {what} for {order}")
    if share(f"busy {what}", order) < 10 and step.attempt == 1:
        raise StepFailed(f"{what} is busy", again=True)


def service(name: str) -> Any:
    """Return what makes a participant of a handler; the barrier takes commands in any order."""

    def register(function: Any) -> Any:
        return services.on(topic(PREFIX, name), ordered=False)(dead_letter()(participant(function)))

    return register


@service("reserve")
def reserve(command: ReserveStock, session: Session) -> StockReserved:
    write(session, "stock", command.order, 1)
    perhaps_fail("stock", command.order)
    return StockReserved(f"r-{command.order}")


@service("release")
def release(command: ReleaseStock, session: Session) -> None:
    write(session, "stock", command.order, -1)


@service("charge")
def charge(command: Charge, session: Session) -> None:
    pay(session, command.order, command.customer, command.amount)
    perhaps_fail("money", command.order)


@service("refund")
def refund(command: Refund, session: Session) -> None:
    pay(session, command.order, command.customer, -command.amount)
    if command.order.startswith("stubborn"):
        raise StepFailed(f"the bank does not take {command.order} back")


@service("ship")
def ship(command: Ship, session: Session) -> None:
    write(session, "parcel", command.order, 1)
    perhaps_fail("parcel", command.order)


@service("cancel")
def cancel(command: CancelShipment, session: Session) -> None:
    write(session, "parcel", command.order, -1)


def without_barrier() -> None:
    """Break a promise: every command is carried out, however often it comes."""
    module = import_module("holdfast.sagas.participant")
    module.verdict = lambda *_: BarrierVerdict.EXECUTE  # type: ignore[attr-defined]


if os.environ.get("SHOP_BREAK") == "barrier":
    without_barrier()
