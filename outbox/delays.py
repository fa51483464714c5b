"""Delayed events: kept apart, moved to the outbox when due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.outbox.schema import delayed, outbox
from holdfast.sql import statements
from holdfast.transactions import transact

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_LOOK_SECONDS, _MOST = 0.25, 1000
_COLUMNS = [column.name for column in outbox.columns if column.name != "seq"]


class Delays:
    """Moves due events into the outbox, oldest first; any relay may do it."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._sql = statements("holdfast.outbox", engine.dialect.name)
        self._clock = clock
        self._looked = float("-inf")

    def move(self) -> int:
        """Move what is due now, if it is time to look; return how many were moved."""
        now = self._clock.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return 0
        moved = self._move_due()
        if moved < _MOST:
            self._looked = now
        return moved

    def _move_due(self) -> int:
        with self._engine.connect() as db:
            wait = db.execute(self._sql["next_due"]).scalar()
            if wait is None or wait > 0:
                return 0
        return transact(self._engine, self._promote, clock=self._clock)

    def _promote(self, db: Connection) -> int:
        now = float(db.execute(self._sql["now"]).scalar_one())
        due = (
            select(delayed)
            .where(delayed.c.due <= now)
            .order_by(delayed.c.due, delayed.c.seq)
            .limit(_MOST)
            .with_for_update(skip_locked=True)
        )
        rows = [dict(row) for row in db.execute(due).mappings()]
        if rows:
            db.execute(insert(outbox), [{name: row[name] for name in _COLUMNS} for row in rows])
            db.execute(delete(delayed).where(delayed.c.seq.in_([row["seq"] for row in rows])))
        return len(rows)
