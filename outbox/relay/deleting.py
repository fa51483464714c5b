"""Deleting what was published, guarded by the leases, beside the reading and the publishing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.outbox.relay.leases import ShardLeaseLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.outbox.relay.leases import Leases

_TOGETHER_SECONDS, _TOGETHER_ROWS, _TOGETHER_BYTES = 0.1, 64, 1 << 16
_LONG = 32  # rows; a statement for a shorter run costs more than to find its rows one by one


class Deleter:
    """Deletes rows that were published, in a thread; one deletion at a time.

    A scan does not see what is deleted during it, and what was not deleted when it ends is
    waited for, or left out, before the next begins: so nothing is read twice. A relay whose
    leases ran out deletes nothing. SQLite has one writer for all and gains nothing by a thread.

    Rows that come one by one are put off, and share a transaction: which costs more than to
    read and publish them. That is for 100 ms, 64 rows or 64 kB at most.
    """

    def __init__(self, engine: Engine, leases: Leases, *, clock: Clock) -> None:
        self._engine = engine
        self._leases = leases
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-outbox-delete")
        self._running: Future[None] | None = None
        self._started: Sequence[int] = ()
        self._later: list[int] = []
        self._size, self._since = 0, 0.0
        """Of what was put off: its bytes, and since when."""

    @property
    def going(self) -> list[int]:
        """The rows that are being deleted, or soon will be."""
        return [*self._started, *self._later]

    def start(self, seqs: Sequence[int]) -> None:
        """Begin to delete *seqs* and what was put off, after the deletion before."""
        if seqs:
            self._start(seqs)

    def _start(self, seqs: Sequence[int] = ()) -> None:
        self._await()
        later, self._later, self._size = self._later, [], 0
        seqs = [*later, *seqs] if later else seqs
        if self._engine.dialect.name == "sqlite":
            self._delete(seqs)
        else:
            self._started = seqs
            self._running = self._thread.submit(self._delete, seqs)

    def put_off(self, seqs: Sequence[int], size: int) -> None:
        """Delete *seqs*, rows of *size* bytes, together with those that come next."""
        if self._running is not None and self._running.done():
            self._await()
        if seqs and not self._later:
            self._since = self._clock.monotonic()
        self._later += seqs
        self._size += size
        if len(self._later) >= _TOGETHER_ROWS or self._size >= _TOGETHER_BYTES or self._left <= 0:
            self._start()

    @property
    def _left(self) -> float:
        """Seconds for which the rows that were put off may wait; without any, for ever."""
        if not self._later:
            return float("inf")
        return self._since + _TOGETHER_SECONDS - self._clock.monotonic()

    def finish(self) -> None:
        """Return once nothing is left to delete; what went wrong with it is raised here."""
        if self._later:
            self._start()
        self._await()

    def _await(self) -> None:
        running, self._running, self._started = self._running, None, ()
        if running is not None:
            running.result()

    def rest(self, seconds: float) -> bool:
        """Return whether something is to be deleted, after *seconds* or when that has changed.

        What was put off for long enough is begun with.
        """
        if self._running is not None:
            wait([self._running], seconds)
            if self._running.done():
                self._await()
            return True
        if not self._later:
            return False
        left = self._left
        if left > 0:
            self._clock.sleep(min(left, seconds))
        else:
            self._start()
        return True

    def drop(self) -> None:
        """Return once nothing is being deleted; if it failed, its rows are read again."""
        running, self._running, self._started = self._running, None, ()
        if running is not None:
            running.exception()
        later, self._later, self._size = self._later, [], 0
        if later:  # the broker has them: whatever else went wrong, they need not go again
            self._thread.submit(self._delete, later).exception()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _delete(self, seqs: Sequence[int]) -> None:
        def delete(db: Connection) -> None:
            if not self._leases.holds(db):
                raise ShardLeaseLost
            delete_rows(db, self._leases, seqs)

        transact(self._engine, delete, clock=self._clock)


def delete_rows(db: Connection, leases: Leases, seqs: Sequence[int]) -> None:
    """Delete the rows with the numbers *seqs*; the caller guards it by the *leases*.

    A row that commits late, in between, is left alone: its number is missing in *seqs*, and
    no range is deleted that holds a number more than they do.
    """
    sql = statements("holdfast.outbox", db.dialect.name)
    found = runs(seqs) if "delete_run" in sql else []
    if found and len(found) * _LONG <= len(seqs):
        db.execute(sql["delete_run"], [{"first": first, "last": last} for first, last in found])
    else:
        db.execute(sql["delete"], {"seqs": leases.listed(seqs)})


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the fewest ranges, each from first to last, that hold *numbers* and nothing else."""
    ordered = sorted(set(numbers))
    if not ordered:
        return []
    first, last = ordered[0], ordered[-1]
    if last - first == len(ordered) - 1:
        return [(first, last)]
    gaps = [(below, above) for below, above in pairwise(ordered) if above - below > 1]
    ends, starts = zip(*gaps, strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))
