"""Gauges of the store for Prometheus, sampled when they are scraped and seldom enough."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.unconfirmed import Unconfirmed
from holdfast.dlq.stats import stats
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric
    from sqlalchemy.engine import Engine

    from holdfast.dlq.uncollected import Uncollected

log = logging.getLogger("holdfast.dlq")


class StoreGauges:
    """Exports open messages, their age and what waits on topics; register it with a registry.

    The store is asked at most every *every* seconds, and so is the broker of *uncollected*,
    the letters that are in no store yet. While one does not answer, `sampled` is 0 and its
    figures are not shown: no old one looks as if it were new.
    """

    def __init__(
        self,
        engine: Engine | None,
        *,
        uncollected: Uncollected | None = None,
        every: float = 15.0,
        clock: Clock = SYSTEM_CLOCK,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._engine = engine
        self._uncollected = uncollected
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: tuple[bool, list[Metric]] = False, []
        self._asked: float | None = None
        self._unconfirmed = Unconfirmed(clock=clock)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Return the figures of now."""
        whole, figures = self._sample()
        yield _gauge("holdfast_dlq_sampled", "1 when the figures are current.", float(whole))
        yield from figures

    def _sample(self) -> tuple[bool, list[Metric]]:
        with self._lock:
            now = self._clock.monotonic()
            if self._asked is None or now - self._asked >= self._every:
                self._asked = now
                self._latest = self._measured()
            return self._latest

    def _measured(self) -> tuple[bool, list[Metric]]:
        whole, figures = True, []
        for part in (self._waiting, self._stored):
            try:
                figures += list(part())
            except Exception as error:  # noqa: BLE001 - a scrape must not fail with the store
                log.warning("the dead letters cannot be measured: %s", told(error))
                whole = False
        return whole, figures

    def _waiting(self) -> Iterator[Metric]:
        """Return what is on topics; nothing where letters go to the store directly."""
        seen = self._uncollected
        if seen is not None:
            seen.sample()
        topics = GaugeMetricFamily(
            "holdfast_dlq_uncollected", "Dead letters on topics, in no store yet.", labels=["topic"]
        )
        counts = {} if seen is None else seen.letters
        for topic, count in (counts or {"": 0}).items():
            topics.add_metric([topic], count)
        yield topics
        yield _gauge("holdfast_dlq_uncollected_seconds",
                     "For how long letters wait on a topic and none is collected.",
                     0.0 if seen is None else seen.seconds)  # fmt: skip
        yield _gauge("holdfast_dlq_expiring_24h",
                     "Uncollected dead letters that the broker's retention eats within a day.",
                     0 if seen is None else seen.expiring)  # fmt: skip

    def _stored(self) -> Iterator[Metric]:
        if self._engine is None:
            return
        seen = stats(self._engine, clock=self._clock)
        topics = GaugeMetricFamily("holdfast_dlq_open", "Pending dead letters.", labels=["topic"])
        for topic, count in seen.by_topic.items():
            topics.add_metric([topic], count)
        if not seen.by_topic:
            topics.add_metric([""], 0)
        yield topics
        yield _gauge("holdfast_dlq_oldest_seconds", "Age of the oldest pending dead letter.",
                     seen.oldest_seconds or 0.0)  # fmt: skip
        yield _gauge("holdfast_dlq_parked", "Dead letters parked for a person.", seen.parked)
        yield _gauge("holdfast_dlq_due", "Dead letters put down for a retry.", seen.due)
        yield _gauge("holdfast_dlq_due_now", "Dead letters whose retry is due.", seen.due_now)
        states = GaugeMetricFamily("holdfast_dlq_groups", "Failure groups.", labels=["state"])
        for state, count in seen.groups_by_state.items():
            states.add_metric([state], count)
        yield states
        with self._engine.connect() as db:
            self._unconfirmed.sample(db)
        yield _gauge("holdfast_replay_unconfirmed",
                     "Replayed messages that the consumer has not confirmed.",
                     self._unconfirmed.messages)  # fmt: skip
        yield _gauge("holdfast_replay_unconfirmed_seconds",
                     "For how long a plan waits for confirmations and none comes.",
                     self._unconfirmed.seconds)  # fmt: skip


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=value)
