"""A batch that the broker is taking, in a thread of its own: meanwhile the last one is marked."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from holdfast.backoff import Backoff
from holdfast.errors import DependencyDown
from holdfast.ports import SinkPowers
from holdfast.publishing import BatchPublisher
from holdfast.tracing.messaging import send
from holdfast.tracing.switch import system_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.clock import Clock
    from holdfast.dlq.replay.reading import ReplayBatch
    from holdfast.errors import HoldfastError
    from holdfast.message import Message
    from holdfast.ports import Published, Sink

log = logging.getLogger("holdfast.dlq.replay")


def failures(results: Sequence[Published]) -> list[tuple[int, HoldfastError]]:
    """Return the places and errors of what was not published."""
    return [(at, result.error) for at, result in enumerate(results) if result.error is not None]


class PlanPublisher:
    """Publishes the batches of a plan one after the other, through outages of the broker."""

    def __init__(self, sink: Sink, clock: Clock, *, meanwhile: float) -> None:
        powers = SinkPowers.of(sink)
        powers.prepare()
        # As long as it takes: the sink's own settings say when to give up.
        within = partial(powers.publish_within, seconds=math.inf)
        system = system_of(sink)

        def publish(messages: Sequence[Message]) -> list[Published]:
            return send(system, messages, lambda: within(messages))

        self._publisher = BatchPublisher(publish, name="holdfast-replay-send", clock=clock)
        self._clock = clock
        self._meanwhile = meanwhile
        self._batch: ReplayBatch | None = None
        """The one on its way."""

    def send(self, batch: ReplayBatch) -> None:
        """Begin to publish *batch*; only when the one before has landed."""
        self._batch = batch
        if batch.messages:
            self._publisher.send(batch.messages)

    def land(
        self,
        *,
        patience: float,
        pause: Callable[[float], None],
        current: Callable[[ReplayBatch], ReplayBatch],
        goes_on: Callable[[], bool],
    ) -> tuple[ReplayBatch, list[tuple[int, HoldfastError]]] | None:
        """Return the batch on its way and its failures, None if there is none.

        While it takes long, *pause* is called every now and then. A broker that is away
        for a while is waited out, by *pause* too, and what is *current* of the batch is
        published again as long as the plan *goes_on*; if it does not, nothing more is sent.
        """
        backoff = Backoff(first=0.1, ceiling=5.0)
        until = self._clock.monotonic() + patience
        attempt = 1
        while (batch := self._batch) is not None:
            try:
                while not self._publisher.wait(self._meanwhile):
                    pause(0.0)
                self._batch = None
                failed = failures(self._publisher.collect())
                down = next((e for _, e in failed if isinstance(e, DependencyDown)), None)
                if down is None:
                    return batch, failed
                raise down
            except DependencyDown as error:
                delay = backoff.delay(attempt) or 0.0
                if self._clock.monotonic() + delay > until:
                    raise
                log.warning("the broker is away, the plan waits: %s", error)
                pause(delay)
                if not goes_on():
                    return None
                self.send(current(batch))
                attempt += 1
        return None

    def abandon(self, seconds: float) -> ReplayBatch | None:
        """Return the batch on its way if the broker takes all of it within *seconds*."""
        batch, self._batch = self._batch, None
        if batch is None or not self._publisher.wait(seconds):
            return None
        try:
            results = self._publisher.collect()
        except Exception:  # noqa: BLE001 - then nobody knows that it is taken
            return None
        return batch if all(result.error is None for result in results) else None

    def close(self) -> None:
        """End the thread, after the batch in flight."""
        self._publisher.close()
