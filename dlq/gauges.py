"""Gauges of the store for Prometheus, sampled when they are scraped and seldom enough."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.unconfirmed import Unconfirmed
from holdfast.dlq.retention import expiring
from holdfast.dlq.stats import Stats, stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric
    from sqlalchemy.engine import Engine

log = logging.getLogger("holdfast.dlq")


class StoreGauges:
    """Exports open messages, their age and what expires; register it with a registry.

    The store is asked at most every *every* seconds. While it does not answer, `sampled` is
    0 and no old figure is shown as if it were new.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        retention: dict[str, float] | None = None,
        every: float = 15.0,
        clock: Clock = SYSTEM_CLOCK,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._engine = engine
        self._retention = {} if retention is None else retention
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: tuple[Stats, int] | None = None
        self._asked: float | None = None
        self._unconfirmed = Unconfirmed(clock=clock)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Return the figures of now."""
        latest = self._sample()
        yield _gauge("holdfast_dlq_sampled", "1 when the figures are current.",
                     float(latest is not None))  # fmt: skip
        if latest is None:
            return
        seen, soon = latest
        topics = GaugeMetricFamily("holdfast_dlq_open", "Pending dead letters.", labels=["topic"])
        for topic, count in seen.by_topic.items():
            topics.add_metric([topic], count)
        if not seen.by_topic:
            topics.add_metric([""], 0)
        yield topics
        yield _gauge("holdfast_dlq_oldest_seconds", "Age of the oldest pending dead letter.",
                     seen.oldest_seconds or 0.0)  # fmt: skip
        yield _gauge("holdfast_dlq_expiring_24h",
                     "Open dead letters that the broker's retention eats within a day.",
                     soon)  # fmt: skip
        yield _gauge("holdfast_dlq_parked", "Dead letters parked for a person.", seen.parked)
        yield _gauge("holdfast_dlq_due", "Dead letters put down for a retry.", seen.due)
        states = GaugeMetricFamily("holdfast_dlq_groups", "Failure groups.", labels=["state"])
        for state, count in seen.groups_by_state.items():
            states.add_metric([state], count)
        yield states
        yield _gauge("holdfast_replay_unconfirmed",
                     "Replayed messages that the consumer has not confirmed.",
                     self._unconfirmed.messages)  # fmt: skip
        yield _gauge("holdfast_replay_unconfirmed_seconds",
                     "For how long a plan waits for confirmations and none comes.",
                     self._unconfirmed.seconds)  # fmt: skip

    def _sample(self) -> tuple[Stats, int] | None:
        with self._lock:
            now = self._clock.monotonic()
            if self._asked is not None and now - self._asked < self._every:
                return self._latest
            self._asked = now
            try:
                seen = stats(self._engine, clock=self._clock)
                soon = expiring(self._engine, retention=self._retention, clock=self._clock)
                with self._engine.connect() as db:
                    self._unconfirmed.sample(db)
                self._latest = seen, sum(one.pending for one in soon)
            except Exception as error:  # noqa: BLE001 - a scrape must not fail with the store
                log.warning("the dead-letter store cannot be measured: %r", error)
                self._latest = None
            return self._latest


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=value)
