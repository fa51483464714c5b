"""Gauges of the store for Prometheus, sampled when they are scraped and seldom enough."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.progress import Unconfirmed
from holdfast.dlq.store.stats import stats
from holdfast.metrics import Across, Instruments, counter, gauge
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric
    from sqlalchemy.engine import Engine

    from holdfast.dlq.topic.collector import Uncollected

log = logging.getLogger("holdfast.dlq")

_CLOSINGS = {"replay": "replayed", "discard": "discarded", "fix": "fixed"}
_ALIKE = Across.MAX  # one store, the same from every process
SAMPLED = gauge("holdfast_dlq_sampled", "1 when the figures are current.", across=Across.MIN)
UNCOLLECTED = gauge(
    "holdfast_dlq_uncollected", "Dead letters on topics, in no store yet.", "topic", across=_ALIKE
)
UNCOLLECTED_SECONDS = gauge(
    "holdfast_dlq_uncollected_seconds",
    "For how long letters wait on a topic and none is collected.",
    across=_ALIKE,
)
EXPIRING = gauge(
    "holdfast_dlq_expiring_24h",
    "Uncollected dead letters that the broker's retention eats within a day.",
    across=_ALIKE,
)
OPEN = gauge("holdfast_dlq_open", "Pending dead letters.", "topic", across=_ALIKE)
OLDEST = gauge(
    "holdfast_dlq_oldest_seconds", "Age of the oldest pending dead letter.", across=_ALIKE
)
PARKED = gauge("holdfast_dlq_parked", "Dead letters parked for a person.", across=_ALIKE)
DUE = gauge("holdfast_dlq_due", "Dead letters put down for a retry.", across=_ALIKE)
DUE_NOW = gauge("holdfast_dlq_due_now", "Dead letters whose retry is due.", across=_ALIKE)
GROUPS = gauge("holdfast_dlq_groups", "Failure groups.", "state", across=_ALIKE)
CLOSED = counter(
    "holdfast_dlq_closed",
    "Dead letters closed so far, by kind: replayed and confirmed, discarded, or fixed by hand.",
    "kind",
    across=_ALIKE,
)
UNCONFIRMED = gauge(
    "holdfast_replay_unconfirmed",
    "Replayed messages that the consumer has not confirmed.",
    across=_ALIKE,
)
UNCONFIRMED_SECONDS = gauge(
    "holdfast_replay_unconfirmed_seconds",
    "For how long a plan waits for confirmations and none comes.",
    across=_ALIKE,
)


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
        Instruments(REGISTRY).tells(
            self, SAMPLED, UNCOLLECTED, UNCOLLECTED_SECONDS, EXPIRING, OPEN, OLDEST, PARKED, DUE,
            DUE_NOW, GROUPS, CLOSED, UNCONFIRMED, UNCONFIRMED_SECONDS,
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Return the figures of now."""
        whole, figures = self._sample()
        yield SAMPLED.family(float(whole))
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
        counts = {} if seen is None else seen.letters
        yield UNCOLLECTED.family(by=(((topic,), n) for topic, n in (counts or {"": 0}).items()))
        yield UNCOLLECTED_SECONDS.family(0.0 if seen is None else seen.seconds)
        yield EXPIRING.family(0 if seen is None else seen.expiring)

    def _stored(self) -> Iterator[Metric]:
        if self._engine is None:
            return
        seen = stats(self._engine, clock=self._clock)
        topics = seen.by_topic or {"": 0}
        yield OPEN.family(by=(((topic,), count) for topic, count in topics.items()))
        yield OLDEST.family(seen.oldest_seconds or 0.0)
        yield PARKED.family(seen.parked)
        yield DUE.family(seen.due)
        yield DUE_NOW.family(seen.due_now)
        yield GROUPS.family(by=(((one,), n) for one, n in seen.groups_by_state.items()))
        closed = seen.resolved_by
        yield CLOSED.family(by=(((kind,), closed[word]) for word, kind in _CLOSINGS.items()))
        with self._engine.connect() as db:
            self._unconfirmed.sample(db)
        yield UNCONFIRMED.family(self._unconfirmed.messages)
        yield UNCONFIRMED_SECONDS.family(self._unconfirmed.seconds)
