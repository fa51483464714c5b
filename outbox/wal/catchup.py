"""Catching up from the table: what the stream does not tell, because it came before.

Slot first, then one snapshot of the table. Rows that the snapshot sees come from here in `seq`
order, all others from the stream in commit order, none from both. Within a key the earlier
event is in every snapshot that holds the later one, so the order holds across the seam. Rows
that the stream will never tell are looked for now and then: the table is the truth.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.db.sql import statements
from holdfast.outbox.rows import read_rows, size_of
from holdfast.outbox.schema import outbox
from holdfast.outbox.wal.protocol import position
from holdfast.outbox.wal.reading import Covered
from holdfast.publishing import BatchSizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.outbox.relay.publishing import MissingTopics
    from holdfast.outbox.rows import Cells
    from holdfast.outbox.wal.cleanup import Cleaner
    from holdfast.outbox.wal.protocol import Waker
    from holdfast.outbox.wal.slot import Export, ReplicationSlot


log = logging.getLogger("holdfast.outbox.wal")

_LOOK_SECONDS = 5.0


class MissedRows:
    """Looks now and then for rows that are older than all that is finished and still there.

    They come from a publication that lacked the table for a while, from a commit that could
    not be seen yet when the slot began, or from a deletion that failed.
    """

    def __init__(self, engine: Engine, cleaner: Cleaner, *, clock: Clock) -> None:
        self._engine = engine
        self._cleaner = cleaner
        self._clock = clock
        self._sql = statements("holdfast.outbox.wal", "postgresql")
        self._looked = clock.monotonic()
        self._seqs: list[int] = []
        self._end = 0

    def found(self, finished: int, missing: MissingTopics) -> bool:
        """Whether rows are left behind; everything before the position *finished* is done.

        Rows of topics that are *missing* are meant to wait.
        """
        if self._seqs:
            return finished >= self._end and self._still_there()
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with self._engine.connect() as db:
                oldest = db.execute(self._sql["oldest"], {"held": list(missing.topics)})
                self._seqs = list(oldest.scalars())
                # Later than the rows: their commits lie before it.
                self._end = position(db.execute(self._sql["log_end"]).scalar_one())
        return False

    def _still_there(self) -> bool:
        self._cleaner.settle()
        known = self._cleaner.unfinished
        asked, self._seqs = [seq for seq in self._seqs if seq not in known], []
        listed = "{" + ",".join(map(str, asked)) + "}"
        with self._engine.connect() as db:
            left = list(db.execute(self._sql["present"], {"seqs": listed}).scalars())
        if left:
            log.warning(
                "%d outbox rows (from seq %d on) never came by the stream: reading the table again",
                len(left), left[0],
            )  # fmt: skip
        return bool(left)


_HALF, _WHOLE = 1 << 31, 1 << 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `pg_current_snapshot()` says: everything below `xmin`, nothing from `xmax` on."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot written as `xmin:xmax:running,…`."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Whether the effects of the committed transaction *xid* are visible.

        The stream has only the lower 32 bits of the number; the full one is that nearest
        to the snapshot.
        """
        full = self.xmax + (xid - self.xmax + _HALF) % _WHOLE - _HALF
        return full < self.xmin or (full < self.xmax and full not in self.running)

    def sees_all(self, xids: Iterable[int]) -> bool:
        """Whether every one of *xids* is visible."""
        return all(map(self.sees, xids))


class Reconcile:
    """One pass over the table as it was when this was made; the transaction ends with it."""

    def __init__(self, engine: Engine, export: Export | None, *, batch: int) -> None:
        self._sizer = BatchSizer(batch)
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

    def read(self, but: Collection[int]) -> list[Cells]:
        """Return the next rows, without those in *but*: published, not yet deleted."""
        most = self._sizer.rows
        rows = read_rows(self._db, self._sql["read_all"], {"after": self._after, "most": most})
        self._sizer.came(len(rows), size_of(rows))
        self._ended = len(rows) < most
        if rows:
            self._after = rows[-1][0]
        return [row for row in rows if row[0] not in but] if but else rows

    def close(self) -> None:
        """End the transaction, so that vacuum may go on."""
        self._db.close()


_LOUD_SECONDS = 10.0


class SlotSetup:
    """The slot first, then the snapshot of the table, so that nothing falls between them."""

    def __init__(
        self,
        engine: Engine,
        slot: ReplicationSlot,
        waker: Waker,
        *,
        batch: int,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._waker = waker
        self._batch = batch
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-open")
        self._future: Future[Reconcile] | None = None
        self._said = self._earliest = float("-inf")

    @property
    def begun(self) -> bool:
        """Whether `result` is to be asked."""
        return self._future is not None

    def not_before(self, moment: float) -> None:
        """Let `begin` do nothing before *moment* of the monotonic clock."""
        self._earliest = moment

    def begin(self) -> None:
        """Start in the thread."""
        now = self._clock.monotonic()
        if now < self._earliest:
            self._waker.wait(min(self._earliest - now, 0.05))
            return
        self._said = now
        self._future = self._thread.submit(self._open)
        self._future.add_done_callback(lambda _: self._waker.wake())

    def result(self) -> Reconcile | None:
        """Return the pass over the table once it can begin; raise what went wrong."""
        if self._future is None or not self._future.done():
            now = self._clock.monotonic()
            if now - self._said > _LOUD_SECONDS:
                self._said = now
                log.warning(
                    "a new replication slot waits for the transactions that are running; see "
                    "SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY xact_start"
                )
            return None
        future, self._future = self._future, None
        return future.result()

    def _open(self) -> Reconcile:
        self._slot.prepare()
        export = self._slot.ensure()
        try:
            return Reconcile(self._engine, export, batch=self._batch)
        finally:
            if export is not None:
                export.close()

    def abandon(self) -> None:
        """Give up what is under way; what it still brings is closed at once.

        Its snapshot would keep vacuum from its work, and later show rows that others
        published long ago.
        """
        future, self._future = self._future, None
        if future is not None and not future.cancel():
            future.add_done_callback(_closed)
            self._slot.cancel()

    def close(self) -> None:
        """End what is under way."""
        self.abandon()
        self._thread.shutdown()


def _closed(future: Future[Reconcile]) -> None:
    if future.exception() is None:
        future.result().close()
