"""Getting slot and snapshot in a thread, for a new slot waits for running transactions."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.outbox.wal.reconcile import Reconcile

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.clock import Clock
    from holdfast.outbox.wal.losses import Losses
    from holdfast.outbox.wal.slot import Slot
    from holdfast.outbox.wal.waker import Waker

log = logging.getLogger("holdfast.outbox.wal")

_LOUD_SECONDS = 10.0


class Opening:
    """The slot first, then the snapshot of the table, so that nothing falls between them."""

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        losses: Losses,
        waker: Waker,
        *,
        batch: int,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._losses = losses
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
            if export is not None:
                self._losses.note(self._slot, export)
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
