"""Pruning: rows that are older than their consumer's window, a few at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency.claim import unclaim_number
from holdfast.idempotency.schema import roster
from holdfast.sql import statements
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine


def prune(
    engine: Engine,
    *,
    consumer: str | None = None,
    step: int = 500,
    seconds: float = math.inf,
    progress: Callable[[str, int], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, int]:
    """Delete what each consumer (or only *consumer*) need not remember; return how many rows.

    Each *step* is a short transaction that skips what another pruner has in hand, so several
    may run at once and no handler waits. After *seconds* no further step begins: call it again
    to go on. *progress* is told the consumer and each step.
    """
    if step < 1:
        raise ConfigurationError(f"prune(step={step}): use 1 or more")
    pruned: dict[str, int] = {}
    until = clock.monotonic() + seconds
    sql = statements("holdfast.idempotency", engine.dialect.name)
    for number, name, window in _windows(engine, consumer):
        if window is None:
            continue

        def work(db: Connection, number: int = number, window: float = window) -> int:
            expired = {"consumer": number, "age": window, "most": step}
            keys = [bytes(key) for key in db.execute(sql["old_rows"], expired).scalars()]
            unclaim_number(db, number, keys)
            db.execute(sql["prune_leases"], {"consumer": number, "age": window})
            return len(keys)

        while done := transact(engine, work, clock=clock):
            pruned[name] = pruned.get(name, 0) + done
            if progress is not None:
                progress(name, done)
            if clock.monotonic() >= until:
                return pruned
    return pruned


def _windows(engine: Engine, consumer: str | None) -> list[Any]:
    query = select(roster.c.id, roster.c.name, roster.c.window_seconds).order_by(roster.c.name)
    if consumer is not None:
        query = query.where(roster.c.name == consumer)
    with engine.connect() as db:
        rows = list(db.execute(query))
    if consumer is not None and not rows:
        raise NotFound(
            f"no consumer {consumer!r} has an inbox here: holdfast inbox stats lists them"
        )
    return rows
