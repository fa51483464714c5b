"""A relay process for the checker; it can be told to break a promise, to see red.

Usage: relay.py DATABASE BROKER ENGINE LEASE_SECONDS [SABOTAGE]

ENGINE is lease or wal. Sabotages are cursor (read by `seq > last`), skipping (leave out one
shard), doomed (die before the third batch is published, which is no broken promise) and ahead
(doomed, and the WAL engine deletes rows before they are published). For zombie and heir, no
broken promises either, and unguarded (a zombie that does not ask whose the shards are), see
handover.py. With transactions, every shard is published in its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.concurrency import signals_heard
from holdfast.db.engine import open_database
from holdfast.outbox import LeaseEngine, LeaseTerms, Relay, RelayStep, ShardSinks
from holdfast.outbox.relay.lease_engine import QueryFailed
from holdfast.outbox.rows import as_row, shard_of
from tests.checker.handover import (
    HEIR,
    UNGUARDED,
    ZOMBIE,
    Refusing,
    freeze_before_parking,
    freeze_before_reading,
)
from tests.checker.writer import KEYS, TOPIC


def no_look(_but: Any) -> Any:
    """Let the relay read in the one way that is sabotaged."""
    raise QueryFailed


def read_by_cursor(engine: Any, memory: Path) -> None:
    """Read rows by `seq > last` and remember last, as naive relays do: late commits are lost."""
    moving = engine._scan
    begin, read = moving.begin, moving.read

    def resume() -> None:
        begin()
        moving._after = int(memory.read_text()) if memory.exists() else 0

    def naive() -> Any:
        rows = read()
        if rows:
            memory.write_text(str(as_row(rows[-1]).seq))
        return rows

    moving.begin, moving.read, moving.look = resume, naive, no_look


def skip_a_shard(engine: Any) -> None:
    """Never see the rows of the first key's shard: nothing is lost, and nothing moves."""
    read, skipped = engine._scan.read, shard_of(TOPIC, KEYS[0], "")
    engine._scan.read = lambda: [row for row in read() if as_row(row).shard != skipped]
    engine._scan.look = no_look


class Doomed:
    """A sink whose process dies before its third batch is published."""

    def __init__(self, sink: Any) -> None:
        self.caps = sink.caps
        self._sink = sink
        self._batches = 0

    def publish(self, messages: Any) -> Any:
        self._batches += 1
        if self._batches == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._sink.publish(messages)

    def close(self) -> None:
        self._sink.close()


def delete_ahead(engine: Any) -> None:
    """Delete what was received, not what was published: a crash loses what lies between."""
    start = engine._dispatch.start

    def started(batch: Any) -> RelayStep:
        engine._cleaner.add([as_row(row).seq for row in batch.rows], batch.xids)
        engine._cleaner.flush(1.0)
        return start(batch)

    engine._dispatch.start = started


def tell(step: RelayStep) -> None:
    """Say that this relay is at work, so that it is worth killing."""
    if step.published:
        sys.stdout.write(f"{step.published}\n")
        sys.stdout.flush()


def main(database: str, broker: str, engine: str, lease: str, sabotage: str = "") -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    terms = LeaseTerms(seconds=float(lease))
    db = open_database(database)
    opened = connect(broker)
    sink: Any = ShardSinks(opened, "checked") if sabotage == "transactions" else opened.sink()
    if sabotage in ("ahead", "doomed"):
        sink = Doomed(sink)
    if sabotage in (ZOMBIE, UNGUARDED):
        sink = Refusing(sink)
    moving: Any
    if engine == "wal":
        from holdfast.outbox.wal import WalEngine

        moving = WalEngine(db, sink, terms=terms)
    else:
        moving = LeaseEngine(db, sink, terms=terms, batch=4)  # small: passes of many batches
    if sabotage == "cursor":
        read_by_cursor(moving, Path(broker.partition("///")[2] + ".cursor"))
    if sabotage == "ahead":
        delete_ahead(moving)
    if sabotage == "skipping":
        skip_a_shard(moving)
    if sabotage in (ZOMBIE, UNGUARDED):
        freeze_before_parking(moving, guarded=sabotage == ZOMBIE)
    if sabotage == HEIR:
        freeze_before_reading(moving)
    running = Relay(moving, backoff=Backoff(first=0.05, ceiling=0.5), observer=tell)
    with signals_heard(lambda _: running.stop()):
        running.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
