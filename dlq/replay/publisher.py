"""The batches that the broker is taking, in a thread of its own: meanwhile others are read."""

from __future__ import annotations

import logging
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from holdfast.backoff import Backoff
from holdfast.errors import DependencyDown
from holdfast.ports import SinkPowers
from holdfast.tracing.messaging import send
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.clock import Clock
    from holdfast.dlq.replay.reading import ReplayBatch
    from holdfast.errors import HoldfastError
    from holdfast.ports import Published, Sink

log = logging.getLogger("holdfast.dlq.replay")


def failures(results: Sequence[Published]) -> list[tuple[int, HoldfastError]]:
    """Return the places and errors of what was not published."""
    return [(at, result.error) for at, result in enumerate(results) if result.error is not None]


_Failures = list[tuple[int, "HoldfastError"]]


class _Flight(NamedTuple):
    batch: ReplayBatch
    failed: Future[_Failures | None]
    """What the broker did not take; None if the batch was not begun."""


class PlanPublisher:
    """Publishes the batches of a plan one after the other, through outages of the broker.

    One batch may wait behind the one that is on its way, so that the broker is not idle between
    the two. It is begun only once all of the one before was taken, and only in time.
    """

    def __init__(self, sink: Sink, clock: Clock, *, meanwhile: float) -> None:
        powers = SinkPowers.of(sink)
        powers.prepare()
        # As long as it takes: the sink's own settings say when to give up.
        self._within = partial(powers.publish_within, seconds=math.inf)
        self._system = system_of(sink)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-replay-send")
        self._clock = clock
        self._meanwhile = meanwhile
        self._flights: deque[_Flight] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is on its way, or has landed and nobody has asked for it yet."""
        return bool(self._flights)

    def send(self, batch: ReplayBatch) -> None:
        """Begin to publish *batch*; only when nothing else is on its way."""
        self._flights.append(_Flight(batch, self._thread.submit(self._publish, batch)))

    def follow(self, batch: ReplayBatch, until: float) -> None:
        """Publish *batch* once all of the one on its way was taken, if *until* is not over then."""
        before = self._flights[-1].failed
        done = self._thread.submit(self._publish_after, before, batch, until)
        self._flights.append(_Flight(batch, done))

    def _publish_after(
        self, before: Future[_Failures | None], batch: ReplayBatch, until: float
    ) -> _Failures | None:
        is_whole = before.exception() is None and before.result() == []
        return self._publish(batch) if is_whole and self._clock.monotonic() < until else None

    def _publish(self, batch: ReplayBatch) -> _Failures:
        messages = batch.messages
        if not messages:
            return []
        return failures(send(self._system, messages, lambda: self._within(messages)))

    def withdraw(self) -> None:
        """Take back the batch that follows the one on its way, unless it has been begun."""
        if len(self._flights) > 1 and self._flights[-1].failed.cancel():
            self._flights.pop()

    def land(
        self,
        *,
        patience: float,
        pause: Callable[[float], None],
        current: Callable[[ReplayBatch], ReplayBatch],
        goes_on: Callable[[], bool],
    ) -> tuple[ReplayBatch, _Failures] | None:
        """Return the batch on its way and its failures, None if there is none.

        While it takes long, *pause* is called every now and then. A broker that is away
        for a while is waited out, by *pause* too, and what is *current* of the batch is
        published again as long as the plan *goes_on*; if it does not, nothing more is sent.
        Unless all of the batch was taken, what was to follow it is forgotten.
        """
        backoff = Backoff(first=0.1, ceiling=5.0)
        until = self._clock.monotonic() + patience
        attempt = 1
        while self._flights:
            batch, landed = self._flights[0]
            try:
                while not wait([landed], self._meanwhile).done:
                    pause(0.0)
                failed = self._collect()
                if failed is not None:
                    down = next((e for _, e in failed if isinstance(e, DependencyDown)), None)
                    if down is None:
                        return batch, failed
                    raise down
                delay = 0.0  # it was too late for it to follow
            except DependencyDown as error:
                delay = backoff.delay(attempt) or 0.0
                if self._clock.monotonic() + delay > until:
                    raise
                log.warning("the broker is away, the plan waits: %s", error)
                attempt += 1
            pause(delay)
            if not goes_on():
                return None
            self.send(current(batch))
        return None

    def _collect(self) -> _Failures | None:
        """Return the failures of the first batch; forget it, and what did not follow it."""
        flight = self._flights.popleft()
        try:
            failed = flight.failed.result()
        except BaseException:
            self._flights.clear()
            raise
        if failed != []:
            self._flights.clear()
        return failed

    def abandon(self, seconds: float) -> ReplayBatch | None:
        """Return the last batch that the broker takes within *seconds*, with all before it."""
        self.withdraw()
        taken = None
        flights, self._flights = self._flights, deque()
        for flight in flights:
            try:
                if flight.failed.result(seconds) != []:
                    break
            except Exception:  # noqa: BLE001 - then nobody knows that it is taken
                break
            taken = flight.batch
        return taken

    def close(self) -> None:
        """End the thread, after the batch in flight."""
        self.withdraw()
        self._thread.shutdown()
