"""A pass over the outbox table: batches in order, all of one moment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from holdfast.isolation import at_one_moment
from holdfast.outbox.portion import Portion
from holdfast.outbox.row_reading import read_rows, size_of
from holdfast.outbox.schema import SHARDS
from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.outbox.leases import Leases
    from holdfast.outbox.missing import MissingTopics
    from holdfast.outbox.rows import Row

_BATCHES = 32  # after so many a pass ends, so that its snapshot holds up no vacuum for long


class TablePass:
    """Reads the rows of our shards upwards by `seq`, as they were when the pass began.

    One snapshot serves the whole pass. Without it a row that commits late, below what was
    read already, would be passed by, and the next event of its key, committed after it,
    would be read first. What commits during a pass waits for the next, which starts from
    the bottom again.

    While there is little to read a pass is *brief*: one statement, which sees one moment by
    itself; on PostgreSQL on a connection that is kept, which takes a third of the time.
    """

    def __init__(
        self, engine: Engine, leases: Leases, missing: MissingTopics, *, batch: int
    ) -> None:
        self._missing = missing
        # SQLite numbers and commits one writer after the other: nothing commits late there,
        # and an open snapshot would be a writer in the way.
        self._frozen = engine.dialect.name != "sqlite"
        self._engine = engine
        self._leases = leases
        self._sql = statements("holdfast.outbox", engine.dialect.name)
        self._portion = Portion(batch)
        self._db: Connection | None = None
        self._after = 0
        self._batches = 0
        self.ended = True
        self.brief = False
        """Whether the next pass is one, or this one."""

    def begin(self) -> None:
        """Start from the lowest row, with a new snapshot."""
        if not self.brief:
            self.end()
        self._after, self._batches, self.ended = 0, 0, False
        if self._frozen and self._db is None:
            self._db = self._kept() if self.brief else at_one_moment(self._engine)

    def read(self) -> list[Row]:
        """Return the next rows; a short batch, or many of them, end the pass."""
        everything = len(self._leases.owned) == SHARDS
        most = self._portion.rows
        where: dict[str, int | str] = {"after": self._after, "most": most}
        if not everything:
            where["shards"] = self._leases.listed(self._leases.owned)
        command = self._sql["read_all" if everything else "read"]
        if held := self._missing.held:  # else many events of theirs would be read in vain
            where["held"] = msgspec.json.encode(sorted(held)).decode()
            command = self._sql["read_all_but" if everything else "read_but"]
        with self._connection() as db:
            rows = read_rows(db, command, where)
        self._portion.came(len(rows), size_of(rows))
        self._batches += 1
        is_short = len(rows) < most
        if self.brief and is_short:
            self.ended = True
        elif self.brief or is_short or self._batches >= _BATCHES:
            self.end()
            self.brief = is_short and self._frozen
        else:
            self._after = rows[-1].seq
        return rows

    def end(self) -> None:
        """Let the snapshot go; the next `begin` takes a new one."""
        self.ended, self.brief = True, False
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _kept(self) -> Connection | None:
        if self._engine.dialect.name != "postgresql":
            return None  # MySQL's drivers ask the server for this, where nobody expects it to fail
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def _connection(self) -> AbstractContextManager[Connection]:
        return self._engine.connect() if self._db is None else nullcontext(self._db)
