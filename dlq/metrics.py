"""Prometheus metrics of dead letters: few labels, never a fingerprint, counted from 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from holdfast.dlq.letter import Class

if TYPE_CHECKING:
    from holdfast.dlq.letter import DeadLetter

_HOMES = ("store", "topic")
_RESULTS = ("sent", "confirmed", "failed_again", "unknown", "withdrawn")


class DlqMetrics:
    """What this process did with dead letters; `watch` starts the series of a consumer at 0."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.messages = Counter(
            "holdfast_dlq_messages",
            "Dead letters written",
            ["group", "topic", "class"],
            registry=registry,
        )
        self.write_failures = Counter(
            "holdfast_dlq_write_failures",
            "Writes of dead letters that failed; without a quarantine nothing was acknowledged",
            ["home"],
            registry=registry,
        )
        self.groups_new = Counter(
            "holdfast_dlq_groups_new", "Failure groups seen for the first time", registry=registry
        )
        self.replayed = Counter(
            "holdfast_replay_messages", "Replayed messages by result", ["result"], registry=registry
        )
        self.consumed = Counter(
            "holdfast_dlq_consumed",
            "Messages settled by consumers that can dead-letter: the base of the ratio",
            ["group"],
            registry=registry,
        )
        for home in _HOMES:
            self.write_failures.labels(home)
        for result in _RESULTS:
            self.replayed.labels(result)

    def watch(self, group: str, topic: str) -> None:
        """Start the series of *topic* in *group*, or the first failure would go unnoticed."""
        self.consumed.labels(group)
        for kind in Class:
            self.messages.labels(group, topic, kind.value)

    def put(self, letter: DeadLetter) -> None:
        """Count a written letter; one that was collected was counted where it failed."""
        if letter.origin == "collected":
            return
        labels = letter.culprit.group, letter.message.topic, letter.failure.kind.value
        self.messages.labels(*labels).inc()

    def write_failed(self, home: str) -> None:
        """Count a letter that could not be written."""
        self.write_failures.labels(home).inc()

    def new_group(self) -> None:
        """Count a group seen for the first time."""
        self.groups_new.inc()


METRICS = DlqMetrics()
