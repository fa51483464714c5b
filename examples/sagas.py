"""An order as a saga over four processes, on SQLite alone: run me with `python examples/sagas.py`.

Inventory, payment and shipping are services of their own: each is a process with its own database
and relay. Stock is reserved and the card charged side by side, then the parcel is sent. One order
goes through, one cannot be shipped and is undone, and of one the refund fails: it waits for a
human.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.orm import Session

from holdfast import Backoff, Consumer, Participant, Saga, Sagas, connect, open_database, outbox
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db.audit import Operator
from holdfast.outbox import LeaseEngine, Relay
from holdfast.sagas import StepFailed, WorkerTerms, create_tables
from holdfast.sagas.operations import Act, SagaOperations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

tables = MetaData()
ledger = Table(
    "ledger", tables, Column("id", Integer, primary_key=True), Column("account", String(20)),
    Column("who", String(20)), Column("amount", Integer),
)  # fmt: skip


class OrderState(msgspec.Struct, frozen=True):
    """What the saga carries from step to step."""

    order: str
    amount: int
    reservation: str = ""


class ReserveStock(msgspec.Struct):
    order: str


class StockReserved(msgspec.Struct):
    reservation: str


class ReleaseStock(msgspec.Struct):
    reservation: str


class Charge(msgspec.Struct):
    order: str
    amount: int


class Refund(msgspec.Struct):
    order: str
    amount: int


class CreateShipment(msgspec.Struct):
    order: str


order = Saga("order", state=OrderState, version=1, deadline="1h")

with order.parallel():

    @order.command("inventory", compensate="release_stock", timeout="30s")
    def reserve_stock(state: OrderState) -> ReserveStock:
        return ReserveStock(state.order)

    @order.command("payment", compensate="refund", timeout="30s")
    def charge(state: OrderState) -> Charge:
        return Charge(state.order, state.amount)


@order.reply(reserve_stock)
def stock_reserved(state: OrderState, reply: StockReserved) -> OrderState:
    return msgspec.structs.replace(state, reservation=reply.reservation)


@order.compensation("inventory")
def release_stock(state: OrderState) -> ReleaseStock:
    return ReleaseStock(state.reservation)


@order.compensation("payment", retry=Backoff(first=0.05, attempts=2))
def refund(state: OrderState) -> Refund:
    return Refund(state.order, state.amount)


@order.command("shipping", pivot=True, timeout="30s")
def create_shipment(state: OrderState) -> CreateShipment:
    return CreateShipment(state.order)


services = Participant()


def book(session: Session, account: str, who: str, amount: int) -> None:
    """Write an entry; should the step fail, it is gone again."""
    session.execute(insert(ledger).values(account=account, who=who, amount=amount))


@services.command
def on_reserve(command: ReserveStock, session: Session) -> StockReserved:
    book(session, "stock", command.order, 1)
    return StockReserved(command.order)


@services.command
def on_release(command: ReleaseStock, session: Session) -> None:
    book(session, "stock", command.reservation, -1)


@services.command
def on_charge(command: Charge, session: Session) -> None:
    book(session, "money", command.order, command.amount)


@services.command
def on_refund(command: Refund, session: Session) -> None:
    if command.order == "cid":
        raise StepFailed("the card was closed")
    book(session, "money", command.order, -command.amount)


@services.command
def on_ship(command: CreateShipment, session: Session) -> None:
    if command.order != "ann":
        raise StepFailed("no such address")
    book(session, "parcels", command.order, 1)


TOPICS = ("inventory", "payment", "shipping")


def opened(folder: Path, name: str) -> Engine:
    """Open the database of one process, with every table that it needs."""
    engine = open_database(f"sqlite:///{folder}/{name}.db")
    for create in (create_consumer_tables, outbox.create_tables, create_tables, tables.create_all):
        create(engine)
    return engine


def connected(folder: Path) -> Broker:
    """Connect to the broker that all processes share."""
    return connect(f"sqlite:///{folder}/broker.db")


def serve(topic: str, folder: Path) -> None:
    """Be the service that carries out the commands of *topic*, until SIGTERM."""
    engine, broker = opened(folder, topic), connected(folder)
    consumer = Consumer(broker, group=topic, database=engine)
    services.attach(consumer, topic)
    with running(Relay(LeaseEngine(engine, broker.sink()))):
        consumer.run()


@contextmanager
def running(*several: Relay | Consumer, run: Callable[[], None] | None = None) -> Iterator[None]:
    """Let each run in a thread of its own; stop them at the end."""
    with ExitStack() as closing:
        for one in several:
            thread = threading.Thread(target=one.run if run is None else run)
            thread.start()
            closing.callback(thread.join)
            closing.callback(one.stop)
        yield


@contextmanager
def started(folder: Path) -> Iterator[None]:
    """Run each service as a process; at the end all of them are ended side by side."""
    commands = [[sys.executable, __file__, topic, str(folder)] for topic in TOPICS]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def balance(folder: Path, who: str) -> str:
    """Return what stands in the books of all services for *who*."""
    total = func.sum(ledger.c.amount).label("total")
    wanted = select(ledger.c.account, total).where(ledger.c.who == who).group_by(ledger.c.account)
    found: dict[str, int] = {}
    for topic in TOPICS:
        engine = open_database(f"sqlite:///{folder}/{topic}.db")
        with engine.connect() as db:
            found |= {row.account: row.total for row in db.execute(wanted)}
        engine.dispose()
    return ", ".join(f"{account} {found[account]}" for account in sorted(found))


def main(folder: Path) -> None:
    """Start the services, run relay and orchestrator here, and see what becomes of three orders."""
    engine, broker = opened(folder, "shop"), connected(folder)
    for topic in (*TOPICS, order.replies):
        broker.create_topic(topic, partitions=2)
    sagas = Sagas(engine, order, terms=WorkerTerms(idle_seconds=0.05))
    orchestrator = Consumer(broker, group="sagas", database=engine)
    with ExitStack() as closing:
        closing.enter_context(started(folder))
        closing.enter_context(running(Relay(LeaseEngine(engine, broker.sink()))))
        closing.enter_context(running(orchestrator, run=lambda: sagas.run(orchestrator)))
        with Session(engine) as session, session.begin():
            for who in ("ann", "bob", "cid"):
                order.start(session, OrderState(who, 30), key=who)
        for who in ("ann", "bob", "cid"):
            found = sagas.wait(who, "4m")
            while {"undoing", "undo-retrying"} & {*SagaOperations(engine).show(who).steps.values()}:
                threading.Event().wait(0.05)  # parked is one step; another may be under way
            print(f"{who}: {found.status} ({found.reason or 'no trouble'}): {balance(folder, who)}")
        operator = Operator(actor="ada", reason="paid back in cash")
        step = SagaOperations(engine).act(Act.MARK_DONE, "cid", operator)
        while not sagas.result("cid").has_ended:
            threading.Event().wait(0.05)
        print(f"cid: {step} was done by hand, {sagas.result('cid').status}")
    broker.close()
    engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
