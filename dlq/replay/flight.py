"""A batch that the broker is taking, in a thread of its own: meanwhile the last one is marked."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast.backoff import Backoff
from holdfast.errors import DependencyDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.clock import Clock
    from holdfast.dlq.replay.outgoing import Batch
    from holdfast.errors import HoldfastError
    from holdfast.message import Message
    from holdfast.ports import Published, Sink

log = logging.getLogger("holdfast.dlq.replay")


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch on its way."""

    batch: Batch
    results: Future[list[Published]]


@runtime_checkable
class Brief(Protocol):
    """A sink that has less to do when nobody asks where the messages are stored."""

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        """Do as `publish`, within *seconds*; results need not tell where a message is."""
        ...

    def prepare(self) -> None:
        """Get ready for that, so that the first call need not."""
        ...


def failures(results: Sequence[Published]) -> list[tuple[int, HoldfastError]]:
    """Return the places and errors of what was not published."""
    return [(at, result.error) for at, result in enumerate(results) if result.error is not None]


class Publisher:
    """Publishes batches one after the other; the next starts when the last has landed.

    So nothing of a key is on its way behind a message that may yet be refused.
    """

    def __init__(
        self, sink: Sink, thread: ThreadPoolExecutor, clock: Clock, *, meanwhile: float
    ) -> None:
        self._publish = sink.publish
        if isinstance(sink, Brief):  # as long as it takes: its own settings say when to give up
            self._publish = partial(sink.publish_within, seconds=math.inf)
            sink.prepare()
        self._thread = thread
        self._clock = clock
        self._meanwhile = meanwhile
        self._flight: Flight | None = None

    def send(self, batch: Batch) -> None:
        """Begin to publish *batch*."""
        self._flight = Flight(batch, self._submit(batch))

    def land(
        self,
        *,
        patience: float,
        pause: Callable[[float], None],
        current: Callable[[Batch], Batch],
        goes_on: Callable[[], bool],
    ) -> tuple[Batch, list[Published]] | None:
        """Return the batch on its way and its results, None if there is none.

        While it takes long, *pause* is called every now and then. A broker that is away
        for a while is waited out, by *pause* too, and what is *current* of the batch is
        published again as long as the plan *goes_on*; if it does not, nothing more is sent.
        """
        backoff = Backoff(first=0.1, ceiling=5.0)
        until = self._clock.monotonic() + patience
        attempt = 1
        while (flight := self._flight) is not None:
            try:
                while not wait([flight.results], self._meanwhile).done:
                    pause(0.0)
                self._flight = None
                results = flight.results.result()
                errors = (error for _, error in failures(results))
                down = next((e for e in errors if isinstance(e, DependencyDown)), None)
                if down is None:
                    return flight.batch, results
                raise down
            except DependencyDown as error:
                delay = backoff.delay(attempt) or 0.0
                if self._clock.monotonic() + delay > until:
                    raise
                log.warning("the broker is away, the plan waits: %s", error)
                pause(delay)
                if not goes_on():
                    return None
                self.send(current(flight.batch))
                attempt += 1
        return None

    def abandon(self, seconds: float) -> Batch | None:
        """Return the batch on its way if the broker takes all of it within *seconds*."""
        flight, self._flight = self._flight, None
        if flight is None or not wait([flight.results], seconds).done:
            return None
        if flight.results.exception() is not None:
            return None
        return flight.batch if all(r.error is None for r in flight.results.result()) else None

    def _submit(self, batch: Batch) -> Future[list[Published]]:
        if batch.messages:
            return self._thread.submit(self._publish, batch.messages)
        nothing: Future[list[Published]] = Future()
        nothing.set_result([])
        return nothing
