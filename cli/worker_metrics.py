"""The metrics of worker processes as one: what a worker counted stays counted when it dies.

A worker tells its figures when it is asked. Counters and histograms of a process that ended are
added to those of the one that took its place, so that the sum over all workers never goes back
and a rate over it neither drops nor jumps. Gauges are of processes that answer, and of no others.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import Exemplar, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GROWING = frozenset({"counter", "histogram", "summary"})
_CREATED = "_created"


class ExemplarReport(msgspec.Struct, frozen=True, array_like=True):
    """The trace that an observation belongs to."""

    labels: dict[str, str]
    value: float
    timestamp: float | None = None


class SampleReport(msgspec.Struct, frozen=True, array_like=True):
    """One figure."""

    name: str
    labels: dict[str, str]
    value: float | None
    """None for a value that JSON does not know."""
    exemplar: ExemplarReport | None = None

    @property
    def key(self) -> SeriesKey:
        """What it is the figure of."""
        return self.name, tuple(sorted(self.labels.items()))


SeriesKey = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, frozen=True):
    """One metric with its samples."""

    name: str
    help: str
    kind: str
    samples: list[SampleReport]

    @property
    def grows(self) -> bool:
        """Whether its figures add up over the processes that there were."""
        return self.kind in _GROWING


def reported(metrics: Iterable[Metric]) -> list[Family]:
    """Return *metrics* as a worker tells them."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                SampleReport(one.name, dict(one.labels), one.value, _exemplar(one.exemplar))
                for one in metric.samples
            ],
        )
        for metric in metrics
    ]


def _exemplar(found: Exemplar | None) -> ExemplarReport | None:
    if found is None:
        return None
    at = None if found.timestamp is None else float(found.timestamp)
    return ExemplarReport(dict(found.labels), found.value, at)


class WorkerSeries:
    """The figures of one place for a worker, over all processes that have filled it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process = 0
        """The number of the process that fills it now, for what it tells."""
        self._told: list[Family] = []
        self._ended: dict[str, Family] = {}
        """What former processes counted, by the names of the metrics."""

    def came(self, process: int, families: list[Family]) -> None:
        """Keep what *process* tells, unless it has ended by now."""
        with self._lock:
            if process == self.process:
                self._told = families

    def ended(self) -> None:
        """Note that the process is gone: what it counted stays, as far as it was told."""
        with self._lock:
            self.process += 1
            for family in self._told:
                if family.grows:
                    self._ended[family.name] = _added(self._ended.get(family.name), family)
            self._told = []

    def shown(self, *, answers: bool) -> list[Family]:
        """Return the figures of now; gauges only of a process that *answers*."""
        with self._lock:
            now = {family.name: family for family in self._told if answers or family.grows}
            for name, before in self._ended.items():
                now[name] = _added(before, now.get(name))
            return list(now.values())


def _added(before: Family | None, now: Family | None) -> Family:
    """Return both as one: figures add up, and what began first is when it began."""
    if before is None or now is None:
        found = before or now
        assert found is not None  # noqa: S101
        return found
    known = {one.key: one for one in before.samples}
    samples = [_sum(known.pop(one.key, None), one) for one in now.samples]
    return Family(now.name, now.help, now.kind, [*samples, *known.values()])


def _sum(before: SampleReport | None, now: SampleReport) -> SampleReport:
    if before is None or before.value is None or now.value is None:
        return now
    together = min if now.name.endswith(_CREATED) else math.fsum
    value = together((before.value, now.value))
    return SampleReport(now.name, now.labels, value, now.exemplar or before.exemplar)


class Merged:
    """The metrics of all workers; a label tells them apart, so that each counts on its own."""

    def __init__(self, workers: Sequence[list[Family]]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """Return one family for each name."""
        found: dict[str, Metric] = {}
        for number, families in enumerate(self._workers):
            for family in families:
                metric = found.setdefault(
                    family.name, Metric(family.name, family.help, family.kind)
                )
                for one in family.samples:
                    labels = {**one.labels, "worker": str(number)}
                    value = math.nan if one.value is None else one.value
                    metric.add_sample(one.name, labels, value, exemplar=_told(one.exemplar))
        return found.values()


def _told(exemplar: ExemplarReport | None) -> Exemplar | None:
    if exemplar is None:
        return None
    return Exemplar(exemplar.labels, exemplar.value, exemplar.timestamp)
