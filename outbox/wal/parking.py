"""Parked keys in the WAL engine: rows may not be visible yet, and some events have no row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.columns import MOST_TEXT, cut
from holdfast.errors import Transient
from holdfast.outbox.leases import LeaseLost
from holdfast.outbox.parking import BEHIND, REFUSED, Parking
from holdfast.outbox.wal.visibility import Snapshot
from holdfast.scrubbing import text_of
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.outbox.leases import Leases
    from holdfast.outbox.outcome import Refused
    from holdfast.outbox.rows import Row

_PATIENCE_SECONDS, _POLL_SECONDS = 10.0, 0.005


class WalParking(Parking):
    """Parks rows like the lease engine, and events of `WalOutbox` by writing their first row."""

    def await_visible(self, xids: Sequence[int]) -> None:
        """Return once the rows of the transactions *xids* can be moved.

        A commit is in the log a moment before its rows can be seen; longer where it waits
        for a synchronous standby.
        """
        snapshot = statements("holdfast.outbox.wal", "postgresql")["snapshot"]
        until = self._clock.monotonic() + _PATIENCE_SECONDS
        while True:
            with self._engine.connect() as db:
                seen = Snapshot.parse(db.execute(snapshot).scalar_one())
            if seen.sees_all(xids):
                return
            if self._clock.monotonic() >= until:
                raise Transient("rows to park cannot be seen yet: their commit still waits")
            self._clock.sleep(_POLL_SECONDS)

    def _move(self, leases: Leases, rows: Sequence[Refused]) -> int:
        emitted = [(row, error) for row, error in rows if row.seq < 0]
        if emitted:
            self._write(leases, emitted)
            rows = [(row, error) for row, error in rows if row.seq > 0]
        return len(emitted) + super()._move(leases, rows)

    def _keep(self, db: Connection, row: Row, why: str | None, how: str) -> bool:
        # The log alone says what exists: a row may be deleted as soon as it was inserted.
        command = statements("holdfast.outbox.wal", "postgresql")["park_gone"]
        values = {**row._asdict(), "error": why, "state": how, "now": self._clock.now()}
        db.execute(command, values)
        return True

    def _write(self, leases: Leases, rows: Sequence[Refused]) -> None:
        command = statements("holdfast.outbox.wal", "postgresql")["park_emitted"]

        def insert(db: Connection) -> None:
            if not leases.holds(db):
                raise LeaseLost
            for row, error in rows:
                values = {
                    **row._asdict(),
                    "error": None if error is None else cut(text_of(error), MOST_TEXT),
                    "state": BEHIND if error is None else REFUSED,
                    "now": self._clock.now(),
                }
                db.execute(command, values)

        self._parked_by(insert, rows)
