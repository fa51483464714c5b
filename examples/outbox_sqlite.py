"""The outbox from commit to consumer on SQLite alone: run it, nothing else is needed.

An order and its event commit together; one that is rolled back leaves no event. A relay
publishes in order per key. An event that the broker refuses parks its key, an operator
cures it, and the key goes on in order.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, insert
from sqlalchemy.orm import Session

from holdfast import Outbox, connect, open_database
from holdfast.cli.migrations import Migrations
from holdfast.db.audit import OUTBOX, Operator, entries
from holdfast.outbox import EventEdit, LeaseEngine, ParkedKeys, ParkedSelection, Relay

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", String, nullable=False),
    Column("note", String, nullable=False),
)


class OrderPlaced(msgspec.Struct):
    customer: str
    note: str


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        engine = open_database("sqlite:///shop.db")
        Migrations(engine).upgrade()  # holdfast db upgrade --database sqlite:///shop.db
        tables.create_all(engine)
        broker = connect("sqlite:///broker.db?max_message=600")

        place(engine, "ada", "gift wrap")
        place(engine, "ada", "x" * 1000)  # more than this broker takes
        place(engine, "ada", "by noon")
        place(engine, "bob", "no hurry")
        place(engine, "bob", "changed my mind", commit=False)
        relay(engine, broker)
        print("arrived:", arrived(broker))

        parked = ParkedKeys(engine)
        key = parked.waiting()[0]
        print(f"parked: {key.topic}/{key.key}, {key.refused} refused, {key.behind} behind")
        why = Operator(actor="ada", reason="the note was pasted twice")
        short = msgspec.json.encode(OrderPlaced("ada", "shortened"))
        parked.edit(str(key.first), EventEdit(payload=short), why)
        parked.release(ParkedSelection(topic="orders", key="ada"), why)
        relay(engine, broker)
        print("arrived:", arrived(broker))
        with engine.connect() as db:
            print("audit:", [entry.action for entry in entries(db, area=OUTBOX)])
        broker.close()
        engine.dispose()
        os.chdir("/")


def place(engine: Engine, customer: str, note: str, *, commit: bool = True) -> None:
    """Write the order and its event in one transaction."""
    with Session(engine) as session:
        session.execute(insert(orders).values(customer=customer, note=note))
        Outbox(source="shop").add(
            session, OrderPlaced(customer, note), topic="orders", key=customer
        )
        if commit:
            session.commit()


def relay(engine: Engine, broker: Broker) -> None:
    """Publish what is there; in production run `holdfast relay` beside the service."""
    sink = broker.sink()
    published = Relay(LeaseEngine(engine, sink)).run_once()
    sink.close()
    print("published:", published)


def arrived(broker: Broker) -> list[tuple[str, str]]:
    """Read on as a consumer group does."""
    source = broker.source(["orders"], group="printer")
    found: list[OrderPlaced] = []
    while batch := source.poll(100, 0.3):
        found += [msgspec.json.decode(d.message.payload or b"", type=OrderPlaced) for d in batch]
        source.accept(batch)
    source.close()
    return sorted(((order.customer, order.note) for order in found), key=lambda pair: pair[0])


if __name__ == "__main__":
    main()
