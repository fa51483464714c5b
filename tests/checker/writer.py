"""A service that writes events of shared keys, in transactions short and long.

Usage: writer.py DATABASE NAME

It says when it begins, and writes until SIGTERM.

The table `counter` is the truth: a key's committed count is n, so exactly the events 1…n of
that key exist, in this order. One transaction in eight is rolled back. A transaction may
stay open after its event was numbered, so that rows become visible out of `seq` order.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time

from sqlalchemy import Column, Integer, MetaData, String, Table, select, update
from sqlalchemy.exc import DBAPIError

from holdfast.db.engine import open_database
from holdfast.outbox import Outbox

KEYS = [f"key-{n}" for n in range(10)]
TOPIC = "checked"
metadata = MetaData()
counter = Table(
    "counter", metadata, Column("name", String(32), primary_key=True), Column("n", Integer)
)


def main(url: str, name: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine, chance = open_database(url), random.Random(name)
    outbox = Outbox(source=name)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not stop.is_set():
        try:
            with engine.begin() as db:
                if not write(db, outbox, chance):
                    db.rollback()
        except DBAPIError:
            engine.dispose()  # the database restarts: whether this one committed, it knows
            time.sleep(0.05)  # pacing: do not spin while the server is away
        if engine.dialect.name == "sqlite":
            time.sleep(chance.uniform(0, 0.03))  # pacing: relays get a turn at the one lock
    engine.dispose()


def write(db, outbox: Outbox, chance: random.Random) -> bool:  # noqa: ANN001 - a Connection
    """Write the next event of one or two keys; return whether to commit."""
    for key in sorted(chance.sample(KEYS, chance.choice([1, 1, 2]))):
        n = db.execute(
            select(counter.c.n).where(counter.c.name == key).with_for_update()
        ).scalar_one()
        db.execute(update(counter).where(counter.c.name == key).values(n=n + 1))
        outbox.add(db, {"key": key, "n": n + 1}, topic=TOPIC, key=key)
    # pacing: an open transaction with a low seq is what cursor readers lose
    time.sleep(chance.choice([0, 0, 0.002, 0.03]))  # pacing: transactions overlap
    return chance.random() > 1 / 8


if __name__ == "__main__":
    main(*sys.argv[1:])
