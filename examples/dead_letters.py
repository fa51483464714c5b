"""A bug at 3 a.m., seen, tried out, replayed and proven: `python examples/dead_letters.py`.

Everything runs on SQLite in a temporary folder. Version 1 of the billing service cannot
handle some orders. The operator sees two problems instead of twelve messages, learns that a
replay before the fix stops by itself, tries the fix on what failed, and replays it. Each
`$` line is a command as it would be typed; what follows is its answer.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.orm import Session  # noqa: TC002 - the handlers' annotation is resolved

from holdfast import Consumer, Message, connect, dead_letter, idempotent, open_database
from holdfast.cli import main as holdfast
from holdfast.consumer import create_tables
from holdfast.dlq.replay import Plans
from holdfast.dlq.store.groups import FailureGroups

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDERS = 40
VAT = {"SE": 25, "DE": 19}
tables = MetaData()
bills = Table("bills", tables, Column("order_id", Integer), Column("vat", String(2)))


class Order(msgspec.Struct):
    id: int
    country: str
    cents: int | None = 500


@dead_letter()
@idempotent
def bill_v1(order: Order, session: Session) -> None:
    """Take for granted that every country has a rate, and every order a price."""
    vat = VAT[order.country] * order.cents // 100
    session.execute(insert(bills).values(order_id=order.id, vat=str(vat % 100)))


@dead_letter()
@idempotent
def bill_v2(order: Order, session: Session) -> None:
    """Know better: other countries pay no VAT here, and a gift has no price."""
    vat = VAT.get(order.country, 0) * (order.cents or 0) // 100
    session.execute(insert(bills).values(order_id=order.id, vat=str(vat % 100)))


RELEASES = {"1.4.1": bill_v1, "1.4.2": bill_v2}


def publish(url: str) -> None:
    broker = connect(url)
    sink = broker.sink()
    for number in range(ORDERS):
        order = Order(number, "SE", None if number % 10 == 7 else 500)
        if number % 5 == 3:
            order.country = "NO"
        body = msgspec.json.encode(order)
        sink.publish([Message.new("orders", body, key=f"order-{number}")])
    sink.close()
    broker.close()


@contextmanager
def billing(broker: str, database: str, version: str) -> Iterator[Consumer]:
    """Run that version of the service, until it is stopped."""
    engine = open_database(database)
    service = Consumer(broker, group="billing", database=engine, version=version)
    service.on("orders")(RELEASES[version])
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()
        service.broker.close()
        engine.dispose()


def operator(command: str) -> int:
    """Run a command as it would be typed; return its exit code."""
    print(f"\n$ {command}", flush=True)
    code = 0
    try:
        holdfast(shlex.split(command)[1:])
    except SystemExit as ended:
        code = int(ended.code or 0)
    print(f"[exit {code}]", flush=True)
    return code


def main() -> None:
    logging.disable(logging.WARNING)  # the operator's view is enough
    os.chdir(Path(__file__).parent)  # where simulate finds the new handler
    with tempfile.TemporaryDirectory() as folder:
        database, broker = f"sqlite:///{folder}/shop.db", f"sqlite:///{folder}/broker.db"
        os.environ |= {"HOLDFAST_DATABASE": database, "HOLDFAST_BROKER": broker}
        engine = open_database(database)
        create_tables(engine)
        tables.create_all(engine)
        publish(broker)
        print(f"{ORDERS} orders, and version 1.4.1 of the service has two bugs")
        with billing(broker, database, "1.4.1") as service:
            while service.tally.handled + service.tally.dead_lettered < ORDERS:
                threading.Event().wait(0.05)
            operator("holdfast dlq stats")
            operator("holdfast dlq groups")
            largest, other = (one.group_id[:8] for one in FailureGroups(engine).listed())
            operator(f"holdfast dlq explain {largest}")
            print("\nA replay before the fix stops at the canary; the rest is not sent:")
            operator(f"holdfast dlq replay {largest} --canary 2 --reason 'a try' --yes")
            operator("holdfast dlq plans list --open")
        print("\nThe fix is tried on the very messages that failed; nothing is written or sent:")
        operator(f"holdfast dlq simulate {largest} {other} --handler dead_letters:bill_v1")
        operator(f"holdfast dlq simulate {largest} {other} --handler dead_letters:bill_v2")
        print("\nVersion 1.4.2 is deployed, and everything goes through:")
        with billing(broker, database, "1.4.2"):
            why = "--reason 'fixed in 1.4.2'"
            (stopped,) = Plans(engine).latest()
            operator(f"holdfast dlq plans abort {stopped.short} {why}")
            operator("holdfast dlq replay --group billing --dry-run")
            operator(f"holdfast dlq replay --group billing --canary 2 {why} --yes")
        operator("holdfast dlq groups")
        operator("holdfast dlq audit --verify")
        with engine.connect() as db:
            billed = sorted(db.execute(select(bills.c.order_id)).scalars())
        print(f"\nbilled exactly once: {billed == list(range(ORDERS))}")
        engine.dispose()


if __name__ == "__main__":
    # Under its own name, as the modules of a service: a failure is known by it.
    sys.path.insert(0, str(Path(__file__).parent))
    import dead_letters

    dead_letters.main()
