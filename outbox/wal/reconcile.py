"""Reading the table in one snapshot: what the stream does not tell, because it came before.

Rows that the snapshot sees come from here in `seq` order, all others from the stream in
commit order, none from both. Within a key the earlier event is in every snapshot that
holds the later one, so the order holds across the seam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.portion import Portion
from holdfast.outbox.row_reading import read_rows, size_of
from holdfast.outbox.schema import outbox
from holdfast.outbox.wal.frames import position
from holdfast.outbox.wal.intake import Covered
from holdfast.outbox.wal.visibility import Snapshot
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.rows import Row
    from holdfast.outbox.wal.slot import Export


class Reconcile:
    """One pass over the table as it was when this was made; the transaction ends with it."""

    def __init__(self, engine: Engine, export: Export | None, *, batch: int) -> None:
        self._portion = Portion(batch)
        self._after = 0
        self._ended = False
        self._sql = statements("holdfast.outbox", "postgresql")
        wal = statements("holdfast.outbox.wal", "postgresql")
        self._db: Connection = engine.connect().execution_options(isolation_level="REPEATABLE READ")
        try:
            if export is not None:
                # The server made this name; it takes no parameter here.
                self._db.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{export.snapshot}'")
            snapshot = Snapshot.parse(self._db.execute(wal["snapshot"]).scalar_one())
            until = position(self._db.execute(wal["log_end"]).scalar_one())
            schema, _ = self._db.execute(wal["table"], {"table": outbox.name}).one()
        except BaseException:
            self._db.close()
            raise
        self.covered = Covered(snapshot, until, schema)

    @property
    def ended(self) -> bool:
        """Whether everything was read."""
        return self._ended

    def read(self, but: Collection[int]) -> list[Row]:
        """Return the next rows, without those in *but*: published, not yet deleted."""
        most = self._portion.rows
        rows = read_rows(self._db, self._sql["read_all"], {"after": self._after, "most": most})
        self._portion.came(len(rows), size_of(rows))
        self._ended = len(rows) < most
        if rows:
            self._after = rows[-1].seq
        return [row for row in rows if row.seq not in but] if but else rows

    def close(self) -> None:
        """End the transaction, so that vacuum may go on."""
        self._db.close()
