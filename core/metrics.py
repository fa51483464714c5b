"""Metrics: each is declared once, for Prometheus and, where somebody asks, for OpenTelemetry.

A declaration says name, kind, labels, unit and buckets. `Instruments` makes of it what counts, in
a registry of Prometheus, as ever. OpenTelemetry reads counters and gauges from there when it
collects, so that while it is off they cost nothing more; only histograms are told one by one.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import ConfigurationError
from holdfast.health import METRICS_TYPE, Exposition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.samples import Sample

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Buckets in seconds, as OpenTelemetry's messaging conventions advise."""
EXEMPLAR_SECONDS = 1.0
"""How long a bucket keeps its exemplar before it takes another: a scrape sees the last one."""
_LONGEST = 200
_UNITS = {"_seconds": "s", "_bytes": "By"}


class MetricKind(Enum):
    """What a metric does over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Across(Enum):
    """How the figures of several processes become one."""

    SUM = "sum"
    """Each knows its own part."""
    MAX = "max"
    """Each tells the same, as what the tables say, or the worst counts."""
    MIN = "min"
    """Here less is worse."""


_TOGETHER: dict[Across, Callable[[Iterable[float]], float]]
_TOGETHER = {Across.SUM: math.fsum, Across.MAX: max, Across.MIN: min}


@dataclass(frozen=True, kw_only=True)
class MetricDefinition:
    """All that there is to know about a metric, in one place."""

    name: str
    """As Prometheus knows it, without `_total`."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    """As OpenTelemetry knows them; for Prometheus dots become underscores."""
    buckets: tuple[float, ...] = ()
    otel: str = ""
    """Its name for OpenTelemetry; made of *name* unless it is a convention's."""
    unit: str = ""
    across: Across = Across.SUM

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """Its labels as Prometheus knows them."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @cached_property
    def series(self) -> str:
        """The name of the series that Prometheus shows first."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    @cached_property
    def otel_name(self) -> str:
        """Its name for OpenTelemetry: the same, with dots around the capability."""
        return self.otel or self.name.replace("_", ".", 2)

    @cached_property
    def otel_unit(self) -> str:
        """Its unit for OpenTelemetry."""
        found = (unit for suffix, unit in _UNITS.items() if self.name.endswith(suffix))
        return self.unit or next(found, "")

    def family(
        self, value: float | None = None, *, by: Iterable[tuple[Sequence[str], float]] = ()
    ) -> Metric:
        """Return *value*, or the values *by* their labels, as a collector yields them."""
        kind = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        if value is not None:
            return kind(self.name, self.help, value=value)
        found = kind(self.name, self.help, labels=self.label_names)
        for labels, one in by:
            found.add_metric(labels, one)
        return found


def counter(
    name: str, help_: str, *labels: str, otel: str = "", unit: str = "", across: Across = Across.SUM
) -> MetricDefinition:
    """Declare what only grows."""
    return _declared(MetricDefinition(name=name, kind=MetricKind.COUNTER, help=help_, labels=labels,
                                      otel=otel, unit=unit, across=across))  # fmt: skip


def gauge(name: str, help_: str, *labels: str, across: Across = Across.SUM) -> MetricDefinition:
    """Declare what goes up and down."""
    return _declared(MetricDefinition(name=name, kind=MetricKind.GAUGE, help=help_, labels=labels,
                                      across=across))  # fmt: skip


def histogram(
    name: str, help_: str, *labels: str, buckets: Sequence[float], otel: str = "", unit: str = ""
) -> MetricDefinition:
    """Declare what is spread over *buckets*."""
    return _declared(MetricDefinition(name=name, kind=MetricKind.HISTOGRAM, help=help_,
                                      labels=labels, buckets=tuple(buckets), otel=otel,
                                      unit=unit))  # fmt: skip


class Collecting(Protocol):
    """What can be asked for its figures: an instrument or a registry of Prometheus, say."""

    def collect(self) -> Iterable[Metric]:
        """Return the figures of now."""
        ...


class TraceLink(NamedTuple):
    """The recorded span in which something was measured."""

    labels: dict[str, str]
    """Its trace and span, as Prometheus keeps them with a bucket."""
    context: Any
    """The same as OpenTelemetry knows it."""


_lock = threading.Lock()
_catalogue: dict[str, MetricDefinition] = {}
_sources: dict[str, list[tuple[weakref.ref[Any], dict[str, str]]]] = {}
"""Who tells a metric, with the attributes of the owner; nothing that would keep either alive."""
_listeners: list[Callable[[MetricDefinition], None]] = []
recorders: dict[str, Callable[[float, Mapping[str, str], Any], None]] = {}
"""Who else hears of what a histogram observes, by its name; empty while OpenTelemetry is off."""


def _declared(definition: MetricDefinition) -> MetricDefinition:
    with _lock:
        known = _catalogue.setdefault(definition.name, definition)
        if known != definition:
            raise ConfigurationError(f"metric {definition.name!r} is declared twice, differently")
        heard = list(_listeners)
    for listener in heard:
        listener(definition)
    return definition


def catalogue() -> list[MetricDefinition]:
    """Return every metric that the loaded modules declare, by name."""
    with _lock:
        return sorted(_catalogue.values(), key=lambda one: one.name)


def listen(listener: Callable[[MetricDefinition], None]) -> None:
    """Call *listener* with each metric: with those that are declared, and with later ones."""
    with _lock:
        _listeners.append(listener)
        known = list(_catalogue.values())
    for definition in known:
        listener(definition)


def unlisten(listener: Callable[[MetricDefinition], None]) -> None:
    """Call *listener* no more."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)


def figures(definition: MetricDefinition) -> dict[tuple[tuple[str, str], ...], float]:
    """Return what a counter or gauge shows in this process now, by its labels and their owner's.

    What several owners tell under the same labels becomes one figure.
    """
    with _lock:
        sources = [(ref(), attributes) for ref, attributes in _sources.get(definition.name, ())]
    together = _TOGETHER[definition.across]
    spelled = dict(zip(definition.label_names, definition.labels, strict=True))
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for source, attributes in sources:
        for family in () if source is None else source.collect():
            if family.name != definition.name:
                continue
            for sample in family.samples:
                if sample.name != definition.series or not math.isfinite(sample.value):
                    continue  # OpenTelemetry takes no infinity
                told = {
                    spelled[name]: label_text(value)
                    for name, value in sample.labels.items()
                    if value
                }
                key = tuple(sorted({**attributes, **told}.items()))
                before = found.get(key)
                found[key] = sample.value if before is None else together((before, sample.value))
    return found


class Instruments:
    """Makes the instruments of one owner in *registry*; OpenTelemetry hears its *attributes*, too.

    What is no longer used anywhere is no longer told.
    """

    def __init__(self, registry: CollectorRegistry, **attributes: str) -> None:
        self.registry = registry
        self.attributes = attributes

    def counter(self, definition: MetricDefinition) -> Counter:
        """Return what counts *definition*."""
        made = Counter(
            definition.name, definition.help, definition.label_names, registry=self.registry
        )
        self.tells(made, definition)
        return made

    def gauge(self, definition: MetricDefinition) -> Gauge:
        """Return what shows *definition*."""
        made = Gauge(
            definition.name, definition.help, definition.label_names, registry=self.registry
        )
        self.tells(made, definition)
        return made

    def histogram(self, definition: MetricDefinition) -> Distribution:
        """Return what observes *definition*."""
        return Distribution(definition, self)

    def tells(self, source: Collecting, *definitions: MetricDefinition) -> None:
        """Note that *source* tells the figures of *definitions*, as long as it is in use."""
        with _lock:
            for definition in definitions:
                kept = [one for one in _sources.get(definition.name, ()) if one[0]() is not None]
                _sources[definition.name] = [*kept, (weakref.ref(source), self.attributes)]


class Distribution:
    """A histogram; Prometheus and OpenTelemetry hear the same of it.

    It counts by itself and shows the registry its figures when that is asked: two of them hear of
    each message, and a `Histogram` of Prometheus is slower. Only where processes
    share their figures by files, as that client can have them do, one is told as well.
    """

    def __init__(self, definition: MetricDefinition, owner: Instruments) -> None:
        self._definition = definition
        self._owner = owner
        self._shared: Histogram | None = None
        self._known: dict[tuple[str, ...], Observed] = {}
        if values.ValueClass is values.MutexValue:
            owner.registry.register(self)
        else:
            self._shared = Histogram(
                definition.name,
                definition.help,
                definition.label_names,
                buckets=definition.buckets,
                registry=owner.registry,
            )
        if not definition.labels:
            self.labels()

    def labels(self, *named: str) -> Observed:
        """Return the part of it that has the values *named* as its labels."""
        found = self._known.get(named)
        if found is None:
            found = self._known.setdefault(named, self._made(named))
        return found

    def observe(self, value: float, link: Callable[[], TraceLink | None] | None = None) -> None:
        """Note *value*, if it has no labels."""
        self._known[()].observe(value, link)

    def describe(self) -> Iterable[Metric]:
        """Return what it is, so that no other of its name is registered."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Return the figures of now."""
        family = self._family()
        for named, one in self._known.copy().items():
            family.add_metric(named, *one.figures())
        return [family]

    def _family(self) -> HistogramMetricFamily:
        known = self._definition
        return HistogramMetricFamily(known.name, known.help, labels=known.label_names)

    def _made(self, named: tuple[str, ...]) -> Observed:
        if self._shared is None:
            return Observed(self._definition, named, self._owner)
        child = self._shared.labels(*named) if named else self._shared
        return _SharedObserved(self._definition, named, self._owner, child)


class Observed:
    """One series of a `Distribution`; any thread may use it."""

    __slots__ = ("_bounds", "_counts", "_due", "_exemplars", "_lock", "_name", "_owner", "_sum",
                 "_told")  # fmt: skip

    def __init__(
        self, definition: MetricDefinition, named: tuple[str, ...], owner: Instruments
    ) -> None:
        self._name = definition.name
        self._bounds = definition.buckets
        size = len(self._bounds) + 1
        self._counts, self._sum = [0] * size, 0.0
        self._exemplars: list[Exemplar | None] = [None] * size
        self._due = [0.0] * size
        """From when on each bucket takes another exemplar."""
        pairs = zip(definition.labels, named, strict=True)
        self._told = {label: value for label, value in pairs if value}
        self._owner = owner
        self._lock = threading.Lock()

    def observe(self, value: float, link: Callable[[], TraceLink | None] | None = None) -> None:
        """Note *value*, and now and then with its bucket the span in which it was measured."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value
        if link is not None or recorders:  # hardly ever: nobody traces, nobody else listens
            self._tell(value, bucket, link)

    def figures(self) -> tuple[list[Any], float]:
        """Return its buckets, each with all below it and its exemplar, and the sum."""
        with self._lock:
            counts, total, exemplars = self._counts.copy(), self._sum, self._exemplars.copy()
        names = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(names, accumulate(counts), exemplars, strict=True)), total

    def _tell(self, value: float, bucket: int, link: Callable[[], TraceLink | None] | None) -> None:
        if link is not None:
            self._keep_exemplar(value, bucket, link)
        if (record := recorders.get(self._name)) is not None:
            found = None if link is None else link()
            told = {**self._owner.attributes, **self._told}
            record(value, told, None if found is None else found.context)

    def _keep_exemplar(
        self, value: float, bucket: int, link: Callable[[], TraceLink | None]
    ) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._due[bucket] or (found := link()) is None:
            return
        self._due[bucket] = now + EXEMPLAR_SECONDS
        self._exemplars[bucket] = Exemplar(found.labels, value, SYSTEM_CLOCK.now().timestamp())


class _SharedObserved(Observed):
    """One series that a `Histogram` of Prometheus writes to a file for all processes."""

    __slots__ = ("_child",)

    def __init__(
        self,
        definition: MetricDefinition,
        named: tuple[str, ...],
        owner: Instruments,
        child: Histogram,
    ) -> None:
        super().__init__(definition, named, owner)
        self._child = child

    def observe(self, value: float, link: Callable[[], TraceLink | None] | None = None) -> None:
        """Note *value*."""
        super().observe(value, link)
        self._child.observe(value)


def label_text(value: str) -> str:
    """Return *value* so that it can be shown: one lone surrogate would cost the whole page."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


class BoundedLabel:
    """Lets the first *most* values of a label through; whatever comes later is *other*.

    Each value is a series that a server keeps for weeks: what users name, or raise, needs a bound.
    """

    def __init__(self, most: int, *, other: str = "other") -> None:
        self._most = most
        self._other = other
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        """Return *value* if it is among the first ones, and no longer than a name is."""
        value = label_text(value[:_LONGEST])
        if value in self._known:
            return value
        with self._lock:
            if len(self._known) >= self._most:
                return value if value in self._known else self._other
            self._known.add(value)
        return value


def exposition(sources: Sequence[Collecting], accept: str = "") -> Exposition:
    """Return the figures of *sources* on one page, in a format that *accept* names.

    That is Prometheus' text unless OpenMetrics is asked for, which knows exemplars as well.
    """
    together: Any = _Together(sources)
    encode, content_type = choose_encoder(accept)
    try:
        return Exposition(content_type, encode(together))
    except ValueError:  # a metric of the application that OpenMetrics does not know
        return Exposition(METRICS_TYPE, generate_latest(together))


class _Together:
    """Several registries as one; what two of them name alike is one family."""

    def __init__(self, sources: Sequence[Collecting]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for source in self._sources:
            for family in source.collect():
                family.samples = [_shown(sample) for sample in family.samples]
                known = found.get(family.name)
                if known is None:
                    found[family.name] = family
                else:
                    known.samples = [*known.samples, *family.samples]
        yield from found.values()


def _shown(sample: Sample) -> Sample:
    """Return *sample* with labels that can be shown, whoever made it."""
    if all(map(str.isascii, sample.labels.values())):
        return sample
    return sample._replace(labels={name: label_text(one) for name, one in sample.labels.items()})
