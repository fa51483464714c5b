"""The relay's figures in Prometheus' format."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from holdfast.outbox.backlog import Backlog, Standing
    from holdfast.outbox.relay import Health
    from holdfast.outbox.slot_standing import SlotStanding

log = logging.getLogger("holdfast.outbox")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STALE = 12  # sampling intervals after which a sample is withheld rather than believed


class Sampler:
    """Measures the outbox now and then in a thread of its own.

    A scrape never waits for the database, and a database that is down never hides the
    counters.
    """

    def __init__(
        self, backlog: Backlog, *, every: float = 5.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._backlog = backlog
        self._every = every
        self._clock = clock
        self._sample: tuple[float, Standing] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-sampler", daemon=True)

    def start(self) -> None:
        """Take the first sample now, then one per interval."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in the database is left behind."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    @property
    def latest(self) -> Standing | None:
        """The last sample, or None when it is missing or too old to be believed."""
        if self._sample is None:
            return None
        taken, standing = self._sample
        return standing if self._clock.monotonic() - taken < self._every * _STALE else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._sample = self._clock.monotonic(), self._backlog.measure()
            except SQLAlchemyError as error:
                log.debug("the backlog cannot be measured now: %s", type(error).__name__)
            except Exception as error:  # noqa: BLE001 - a row that nobody foresaw must not blind
                log.error("the backlog cannot be measured: %s", told(error))  # noqa: TRY400
            self._clock.wait(self._stop, self._every)


class StepMetrics(Collector):
    """A registry of its own, and how long the steps of *what* took in it."""

    def __init__(self, what: str) -> None:
        self._registry = CollectorRegistry()
        self.step_seconds = Histogram(
            f"holdfast_{what}_step_seconds",
            f"How long the steps of the {what} took.",
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all series as Prometheus scrapes them."""
        return generate_latest(self._registry)


class RelayMetrics(StepMetrics):
    """What Prometheus reads; every series is there from the start, at 0."""

    def __init__(self, health: Health, sampler: Sampler, *, shards: Callable[[], int]) -> None:
        super().__init__("relay")
        self._health = health
        self._sampler = sampler
        self._shards = shards
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Read the relay's health and the last sample of the tables."""
        health = self._health
        yield CounterMetricFamily(
            "holdfast_relay_published",
            "Events that the broker took and whose rows are gone.",
            value=health.published,
        )
        yield CounterMetricFamily(
            "holdfast_relay_parked", "Events set aside by this relay.", value=health.parked
        )
        yield _gauge("holdfast_relay_outage", "1 while the broker or the database is down.",
                     float(health.outage is not None))  # fmt: skip
        yield _gauge("holdfast_relay_standby", "1 while another relay is at work.",
                     float(health.standby))  # fmt: skip
        yield _gauge("holdfast_relay_hindered", "1 while a stranger keeps it from its work.",
                     float(health.hindered is not None))  # fmt: skip
        yield _gauge("holdfast_relay_missing_topics", "Topics that do not exist; events wait.",
                     float(len(health.missing)))  # fmt: skip
        yield CounterMetricFamily(
            "holdfast_relay_slots_lost",
            "Replication slots that were lost with events that had no row.",
            value=health.slots_lost,
        )
        yield _gauge("holdfast_relay_leases_owned", "Shards that this relay owns.",
                     float(self._shards()))  # fmt: skip
        standing = self._sampler.latest
        yield _gauge("holdfast_outbox_sampled", "1 when the figures of the tables are current.",
                     float(standing is not None))  # fmt: skip
        if standing is not None:
            yield from _tables(standing)


def _tables(standing: Standing) -> Iterator[Metric]:
    yield _gauge("holdfast_outbox_backlog", "Events not yet published.", standing.waiting)
    if standing.oldest_seconds is not None:
        yield _gauge("holdfast_outbox_oldest_age_seconds",
                     "Age of the first unpublished event.", standing.oldest_seconds)  # fmt: skip
    yield _gauge("holdfast_outbox_parked", "Events parked now.", standing.parked)
    yield _gauge("holdfast_outbox_delayed", "Events that wait to be due.", standing.delayed)
    yield _gauge("holdfast_outbox_overdue_seconds",
                 "How long the first delayed event has been due.",
                 standing.overdue_seconds)  # fmt: skip
    if standing.slot is not None:
        yield from _slot(standing.slot)


def _slot(slot: SlotStanding) -> Iterator[Metric]:
    yield _gauge("holdfast_slot_lost", "1 while the WAL engine's slot is lost or missing.",
                 float(slot.is_lost))  # fmt: skip
    yield _gauge("holdfast_slot_retained_bytes", "Log that the slot keeps on the server's disk.",
                 slot.retained)  # fmt: skip
    yield _gauge("holdfast_slot_unconfirmed_bytes",
                 "Log that the relay has not yet finished.", slot.unconfirmed)  # fmt: skip
    if slot.safe is not None:
        yield _gauge("holdfast_slot_safe_bytes",
                     "Log that can still be written before the slot is lost.",
                     slot.safe)  # fmt: skip


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
