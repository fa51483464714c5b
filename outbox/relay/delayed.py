"""Delayed events: kept apart, moved to the outbox when due."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.outbox.bulk import insert_all
from holdfast.outbox.relay.latency import DUE
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.schema import delayed, outbox
from holdfast.publishing import fitting

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine, RowMapping

    from holdfast.outbox.relay.leases import Leases

_LOOK_SECONDS, _MOST = 0.25, 1000
_COLUMNS = [column.name for column in outbox.columns if column.name != "seq"]


class DelayedEvents:
    """Moves due events of our shards into the outbox, in the order of their due times.

    Guarded by the leases: of one key, a single relay moves at a time, so that no later
    event gets the lower number.
    """

    def __init__(self, engine: Engine, leases: Leases, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._leases = leases
        self._sql = statements("holdfast.outbox", engine.dialect.name)
        self._clock = clock
        self._looked = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether it is time for `move` to look."""
        return self._clock.monotonic() - self._looked >= _LOOK_SECONDS

    def is_told(self, seconds: float | None) -> bool:
        """Return whether an event is due, which somebody has just been told is in *seconds*."""
        if seconds is not None and seconds <= 0:
            return True
        self._looked = self._clock.monotonic()
        return False

    def move(self) -> int:
        """Move what is due now, if it is time to look; return how many were moved."""
        if not self.is_due:
            return 0
        now = self._clock.monotonic()
        moved = self._move_due()
        if moved < _MOST:
            self._looked = now
        return moved

    def _move_due(self) -> int:
        with self._engine.connect() as db:
            if not self.is_told(db.execute(self._sql["next_due"]).scalar()):
                return 0
        return transact(self._engine, self._promote, clock=self._clock)

    def _promote(self, db: Connection) -> int:
        if not self._leases.holds(db):
            raise ShardLeaseLost
        now = float(db.execute(self._sql["now"]).scalar_one())
        ours = delayed.c.shard.in_(list(self._leases.owned))
        order = (delayed.c.due, delayed.c.seq)
        sizes = select(delayed.c.seq, func.length(delayed.c.payload))
        due = sizes.where(delayed.c.due <= now, ours).order_by(*order).limit(_MOST)
        if seqs := fitting(map(tuple, db.execute(due))):
            these = delayed.c.seq.in_(seqs)
            rows = db.execute(select(delayed).where(these).order_by(*order)).mappings()
            insert_all(db, outbox, [_dated(row) for row in rows])
            db.execute(delete(delayed).where(these))
        return len(seqs)


def _dated(row: RowMapping) -> dict[str, Any]:
    """Return the outbox row of a delayed one; its headers tell when it was due."""
    due = datetime.fromtimestamp(row["due"], UTC).isoformat()
    headers = row["headers"]
    if isinstance(headers, list):
        headers = [*headers, [DUE, due]]
    elif isinstance(headers, dict):  # of somebody else's making
        headers = {**headers, DUE: due}
    return {**{name: row[name] for name in _COLUMNS}, "headers": headers}
