"""Deleting the rows that were published: batched, guarded by the lease, a little behind."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.outbox.relay.deleting import delete_rows
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.wal.catchup import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.outbox.relay.leases import Leases

EVERY_SECONDS, EVERY_ROWS = 0.25, 2000
FIRST_ROWS = 64
"""How many rows may be published before the first of them is deleted."""
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Deleted:
    """Rows that were published, and the transactions that wrote them."""

    seqs: Sequence[int]
    xids: Sequence[int]


class Cleaner:
    """Deletes in a thread of its own; a relay whose lease ran out deletes nothing.

    The stream can be ahead of the table: a commit is in the log a moment before others see
    its rows. What cannot be seen yet is kept and deleted later.

    A relay that is killed repeats what it had published and not deleted. So it may publish a
    few rows at first, and with each deletion more: never more than that and what it has
    deleted so far, nor more than *most*.
    """

    def __init__(
        self,
        engine: Engine,
        leases: Leases,
        ended: Callable[[], None],
        *,
        clock: Clock,
        most: int = 2 * EVERY_ROWS,
    ) -> None:
        self._most = most
        self._finished = 0
        """Rows that are known to be gone, since the last outage."""
        self._engine = engine
        self._leases = leases
        self._ended = ended
        self._clock = clock
        self._snapshot = statements("holdfast.outbox.wal", "postgresql")["snapshot"]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-clean")
        self._waiting: list[Deleted] = []
        self._rows = self._going = 0
        """How many rows wait, and how many are being deleted."""
        self._work: list[Deleted] = []
        self._running: Future[list[Deleted]] | None = None
        self._began = clock.monotonic()
        self._rest = 0.0

    @property
    def _window(self) -> int:
        return min(self._most, FIRST_ROWS + self._finished)

    def room(self, rows: int) -> int:
        """Return how many of *rows* may be published now; none rather than a small part."""
        left = self._window - self._rows - self._going
        return min(left, rows) if left >= min(rows, (self._window + 1) // 2) else 0

    def narrow(self) -> None:
        """Begin with few again: what was sent may be stored or not, and is sent once more."""
        self._finished = 0

    def add(self, seqs: Sequence[int], xids: Sequence[int]) -> None:
        """Delete *seqs* soon."""
        if seqs:
            self._waiting.append(Deleted(seqs, xids))
            self._rows += len(seqs)

    def work(self) -> None:
        """Start the next deletion if it is time; raise what the last one ran into."""
        if self._running is not None:
            if not self._running.done():
                return
            self._collect()
        late = self._clock.monotonic() - self._began
        # What could not be seen is looked for again a moment later, not at once.
        many = late >= self._rest and self._rows >= min(EVERY_ROWS, self._window // 2)
        if self._waiting and (many or late >= EVERY_SECONDS):
            self._start()

    def settle(self) -> None:
        """Return once no deletion is running."""
        if self._running is not None:
            self._collect()

    def flush(self, seconds: float) -> None:
        """Delete everything, but give up on what cannot be seen within *seconds*."""
        until = self._clock.monotonic() + seconds
        self.settle()
        while self._waiting:
            self._start()
            self._collect()
            if self._waiting:
                if self._clock.monotonic() >= until:
                    return
                self._clock.sleep(_POLL_SECONDS)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to delete."""
        return self._running is None and not self._waiting

    @property
    def unfinished(self) -> set[int]:
        """Rows that were published and are still there."""
        return {seq for done in self._waiting for seq in done.seqs}

    def forget(self) -> None:
        """Drop what waits: the rows belong to another relay now."""
        if (running := self._running) is not None:
            self._running = None
            running.exception()
        self._waiting, self._rows, self._going = [], 0, 0
        self.narrow()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _start(self) -> None:
        self._began = self._clock.monotonic()
        work, self._waiting = self._waiting, []
        self._rows, self._going = 0, self._rows
        self._work = work
        self._running = self._thread.submit(self._delete, work)
        self._running.add_done_callback(lambda _: self._ended())

    def _collect(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        try:
            left = running.result()
        except BaseException:
            left = self._work
            raise
        finally:
            self._waiting[:0] = left
            self._rest = _POLL_SECONDS if left else 0.0
            kept = sum(len(done.seqs) for done in left)
            self._finished += self._going - kept
            self._rows, self._going = self._rows + kept, 0

    def _delete(self, work: list[Deleted]) -> list[Deleted]:
        """Delete the rows of *work* that can be seen; return the rest."""
        return transact(self._engine, lambda db: self._delete_seen(db, work), clock=self._clock)

    def _delete_seen(self, db: Connection, work: list[Deleted]) -> list[Deleted]:
        if not self._leases.holds(db):
            raise ShardLeaseLost
        seen = Snapshot.parse(db.execute(self._snapshot).scalar_one())
        ready = [done for done in work if seen.sees_all(done.xids)]
        seqs = [seq for done in ready for seq in done.seqs]
        if seqs:
            delete_rows(db, self._leases, seqs)
        return [done for done in work if done not in ready] if len(ready) < len(work) else []
