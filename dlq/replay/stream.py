"""The stream of a plan: the next batch is read while the one before is on its way."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.outgoing import Batch, Reader

_SECOND = 1.0
_FIRST = 200  # messages, before anything is known about their size
_MOST_BYTES = 16 * 1024 * 1024
"""Of payloads in a batch: three of them are in memory at a time."""


class Stream:
    """Gives out the items of a plan in batches of bounded size."""

    def __init__(
        self, engine: Engine, reader: Reader, ahead: ThreadPoolExecutor, *, batch: int
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._pool = ahead
        self._batch = batch
        self._ahead: tuple[int, int, Future[Batch]] | None = None
        self.fits = min(batch, _FIRST)
        """How many messages make a batch."""

    def read(self, start: int, end: int, meanwhile: Callable[[], None]) -> Batch:
        """Return what is to be sent from *start* up to before *end*.

        While that takes long, *meanwhile* is called every second.
        """
        was_ahead = self._ahead is not None and self._ahead[:2] == (start, end)
        if not was_ahead:
            self._drop()
            self.read_ahead(start, end)
        assert self._ahead is not None  # noqa: S101 - a batch has at least one number
        future, self._ahead = self._ahead[2], None
        while not wait([future], _SECOND).done:
            meanwhile()
        found = future.result()
        return self.current(found) if was_ahead else found

    def _drop(self) -> None:
        """Forget what was read ahead: something else is wanted."""
        if self._ahead is not None:
            self._ahead[2].cancel()
            self._ahead = None

    def read_ahead(self, start: int, end: int) -> None:
        """Begin to read from *start* up to before *end*."""
        if start < end:
            self._ahead = start, end, self._pool.submit(self._fetch, start, end)

    def current(self, batch: Batch) -> Batch:
        """Return *batch* without what was held back or confirmed since it was read."""
        with self._engine.connect() as db:
            return batch.without(self._reader.settled(db, batch.start, batch.end))

    def _fetch(self, start: int, end: int) -> Batch:
        batch = self._reader.batch(self._engine, start, end)
        if batch.messages:
            size = sum(len(message.payload or b"") for message in batch.messages)
            average = size // len(batch.messages) + 1
            self.fits = max(1, min(self._batch, _MOST_BYTES // average))
        return batch
