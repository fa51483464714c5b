"""The stream of a plan: the next batches are read while the one before is on its way."""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.outgoing import Batch, Reader

_SECOND = 1.0
_FIRST = 200  # messages, before anything is known about their size
_GROWTH = 5  # so that the second batch does not wait for a whole one to be read
_MOST_BYTES = 12 * 1024 * 1024
"""Of payloads in a batch: four of them are in memory at a time."""
AHEAD = 2
"""Batches that are read ahead, and the threads for it: the database looks for the rows of one
while those of the other become messages."""


class _Ahead(NamedTuple):
    start: int
    end: int
    batch: Future[Batch]


class Stream:
    """Gives out the items of a plan in batches of bounded size."""

    def __init__(
        self, engine: Engine, reader: Reader, threads: ThreadPoolExecutor, *, batch: int
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._threads = threads
        self._batch = batch
        self._ahead: deque[_Ahead] = deque()
        self._size = min(batch, _FIRST)

    def fits(self, start: int) -> int:
        """Return how many messages from *start* make a batch: those that are read already."""
        if self._ahead and self._ahead[0].start == start:
            return self._ahead[0].end - start
        return self._size

    def read(self, start: int, end: int, meanwhile: Callable[[], None]) -> Batch:
        """Return what is to be sent from *start* up to before *end*.

        While that takes long, *meanwhile* is called every second.
        """
        was_ahead = bool(self._ahead) and self._ahead[0][:2] == (start, end)
        if not was_ahead:
            self._drop()
            self._begin(start, end)
        future = self._ahead.popleft().batch
        while not wait([future], _SECOND).done:
            meanwhile()
        found = future.result()
        return self.current(found) if was_ahead else found

    def _drop(self) -> None:
        """Forget what was read ahead: something else is wanted."""
        for one in self._ahead:
            one.batch.cancel()
        self._ahead.clear()

    def read_ahead(self, start: int, until: int) -> None:
        """Begin to read the next batches from *start* on, up to before *until*."""
        if self._ahead:
            start = self._ahead[-1].end
        while start < until and len(self._ahead) < AHEAD:
            end = min(until, start + self._size)
            self._begin(start, end)
            start = end

    def _begin(self, start: int, end: int) -> None:
        self._ahead.append(_Ahead(start, end, self._threads.submit(self._fetch, start, end)))

    def current(self, batch: Batch) -> Batch:
        """Return *batch* without what was held back or confirmed since it was read."""
        with self._engine.connect() as db:
            return batch.without(self._reader.settled(db, batch.start, batch.end))

    def _fetch(self, start: int, end: int) -> Batch:
        batch = self._reader.batch(self._engine, start, end)
        if batch.messages:
            size = sum(len(message.payload or b"") for message in batch.messages)
            average = size // len(batch.messages) + 1
            more = max(self._size, len(batch.messages) * _GROWTH)
            self._size = max(1, min(self._batch, more, _MOST_BYTES // average))
        return batch
