"""Metrics of dead letters: few labels, never a fingerprint, counted from 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry

from holdfast.dlq.letter import Class
from holdfast.metrics import BoundedLabel, Instruments, counter, label_text

if TYPE_CHECKING:
    from holdfast.dlq.letter import DeadLetter

_HOMES = ("store", "topic")
_RESULTS = ("sent", "confirmed", "failed_again", "unknown", "withdrawn")
MOST_ERRORS = 100
"""Types of errors that are told by name; the others are `other`."""

MESSAGES = counter("holdfast_dlq_messages", "Dead letters written", "group", "topic", "class")
ERRORS = counter(
    "holdfast_dlq_errors",
    "Dead letters written, by the type of the error that came first; beyond 100 types: other",
    "group", "topic", "error_type",
)  # fmt: skip
WRITE_FAILURES = counter(
    "holdfast_dlq_write_failures",
    "Writes of dead letters that failed; without a quarantine nothing was acknowledged",
    "home",
)
GROUPS_NEW = counter("holdfast_dlq_groups_new", "Failure groups seen for the first time")
REPLAYED = counter("holdfast_replay_messages", "Replayed messages by result", "result")
SETTLED = counter(
    "holdfast_dlq_consumed",
    "Messages settled by consumers that can dead-letter: the base of the ratio",
    "group",
)


class DlqMetrics:
    """What this process did with dead letters; `watch` starts the series of a consumer at 0."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        made = Instruments(registry)
        self.messages = made.counter(MESSAGES)
        self.errors = made.counter(ERRORS)
        self.write_failures = made.counter(WRITE_FAILURES)
        self.groups_new = made.counter(GROUPS_NEW)
        self.replayed = made.counter(REPLAYED)
        self.consumed = made.counter(SETTLED)
        self._error_type = BoundedLabel(MOST_ERRORS)
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
        failure = letter.failure
        group, topic = label_text(letter.culprit.group), label_text(letter.message.topic)
        self.messages.labels(group, topic, failure.kind.value).inc()
        self.errors.labels(group, topic, self._error_type(failure.root.type)).inc()

    def write_failed(self, home: str) -> None:
        """Count a letter that could not be written."""
        self.write_failures.labels(home).inc()

    def new_group(self) -> None:
        """Count a group seen for the first time."""
        self.groups_new.inc()


METRICS = DlqMetrics()
