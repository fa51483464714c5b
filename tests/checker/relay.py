"""A relay process for the checker; it can be told to break a promise, to see red.

Usage: relay.py DATABASE BROKER ENGINE LEASE_SECONDS [SABOTAGE]
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.database import open_database
from holdfast.outbox import LeaseEngine, LeaseTerms, Relay, Step


def read_by_cursor(engine: Any, memory: Path) -> None:
    """Read rows by `seq > last` and remember last, as naive relays do: late commits are lost."""
    moving = engine._pass
    begin, read = moving.begin, moving.read

    def resume() -> None:
        begin()
        moving._after = int(memory.read_text()) if memory.exists() else 0

    def naive() -> Any:
        rows = read()
        if rows:
            memory.write_text(str(rows[-1].seq))
        return rows

    moving.begin, moving.read = resume, naive


def tell(step: Step) -> None:
    """Say that this relay is at work, so that it is worth killing."""
    if step.published:
        sys.stdout.write(f"{step.published}\n")
        sys.stdout.flush()


def main(database: str, broker: str, engine: str, lease: str, sabotage: str = "") -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    terms = LeaseTerms(seconds=float(lease), engine=engine, exclusive=engine == "wal")
    db, sink = open_database(database), connect(broker).sink()
    moving: Any
    if engine == "wal":
        from holdfast.outbox.wal import WalEngine

        moving = WalEngine(db, sink, terms=terms)
    else:
        moving = LeaseEngine(db, sink, terms=terms, batch=4)  # small: passes of many batches
    if sabotage == "cursor":
        read_by_cursor(moving, Path(broker.partition("///")[2] + ".cursor"))
    running = Relay(moving, backoff=Backoff(first=0.05, ceiling=0.5), observer=tell)
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    running.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
