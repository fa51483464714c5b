"""Prometheus metrics of a consumer; labels are topics and outcomes, which are few."""

from __future__ import annotations

from collections import Counter as Tallied
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.ports import Lane

OUTCOMES = (
    "handled", "duplicates", "failed", "released", "dead_lettered", "crashed", "skipped",
    "held_back", "withdrawn", "unmarked",
)  # fmt: skip
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class ConsumerMetrics:
    """What a consumer exports; every series of a known topic starts at 0."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._shown: set[str] = set()
        self._consumed = Counter(
            "holdfast_consumer_messages",
            "What became of messages and attempts, by topic",
            ["topic", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "holdfast_consumer_handler_seconds",
            "How long handlers ran",
            ["topic"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.batch = Histogram(
            "holdfast_consumer_batch_messages",
            "How many messages were handled in one transaction, where handlers run in batches",
            ["topic"],
            buckets=_SIZES,
            registry=self.registry,
        )
        self._lag = Gauge(
            "holdfast_consumer_lag",
            "Messages of the owned partitions that are not settled yet",
            ["topic"],
            registry=self.registry,
        )
        self.held_keys = Gauge(
            "holdfast_consumer_held_keys", "Keys that wait in the database", registry=self.registry
        )
        self.parked = Gauge(
            "holdfast_consumer_parked",
            "Messages parked in the database",
            registry=self.registry,
        )
        self.paused = Gauge(
            "holdfast_consumer_paused",
            "Partitions that are paused, by a full backlog or an open circuit",
            registry=self.registry,
        )
        self.stalled = Gauge(
            "holdfast_consumer_stalled_partitions",
            "Partitions that hold messages and bring none, though nothing keeps them back",
            registry=self.registry,
        )
        self.hanging = Gauge(
            "holdfast_consumer_hanging",
            "Handlers that run longer than hang_seconds",
            registry=self.registry,
        )
        self._down = Gauge(
            "holdfast_consumer_down",
            "1 while that does not answer and the intake waits for it",
            ["what"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "holdfast_consumer_in_flight", "Handlers that run now", registry=self.registry
        )
        self._suspects = Gauge(
            "holdfast_consumer_suspects",
            "Messages in hand whose process died; they run apart, and all others wait for them",
            registry=self.registry,
        )

    def begin(
        self, topics: Iterable[str], in_flight: Callable[[], int], suspects: Callable[[], int]
    ) -> None:
        """Show every series of *topics* from the start."""
        for topic in topics:
            for outcome in OUTCOMES:
                self._consumed.labels(topic, outcome)
            self._lag.labels(topic).set(0)
        self._in_flight.set_function(lambda: float(in_flight()))
        self._suspects.set_function(lambda: float(suspects()))

    def watch(self, what: str, down: Callable[[], str | None]) -> None:
        """Show whether *what* is down, by what *down* says when it is asked."""
        self._down.labels(what).set_function(lambda: float(down() is not None))

    def count(self, topic: str, outcome: str) -> None:
        """Count one outcome."""
        self._consumed.labels(topic, outcome).inc()

    def show_lag(self, lag: Mapping[Lane, int], topics: Iterable[str]) -> None:
        """Show how far behind each of *topics* is, and their retry tiers and replays by name."""
        found = Tallied(dict.fromkeys(topics, 0))
        for lane, count in lag.items():
            found[lane.topic] += count
        self._shown.update(found)
        for topic in self._shown:
            self._lag.labels(topic).set(found[topic])


__all__ = ["OUTCOMES", "REGISTRY", "ConsumerMetrics"]
