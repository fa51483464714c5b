"""Metrics: declared once, the same for Prometheus and OpenTelemetry, with bounded labels."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry, Counter, Info
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from holdfast import metrics
from holdfast.errors import ConfigurationError
from holdfast.health import METRICS_TYPE
from holdfast.metrics import (
    Across,
    BoundedLabel,
    Instruments,
    MetricDefinition,
    MetricKind,
    TraceLink,
    exposition,
)
from holdfast.tracing import disable_metrics, enable_metrics
from holdfast.tracing.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_numbers = itertools.count()


class Trial:
    """Three metrics that no other test has."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        name = f"holdfast_trial{self.number}"
        self.placed = metrics.counter(f"{name}_placed", "Orders placed.", "shop.name", "kind")
        self.waiting = metrics.gauge(f"{name}_waiting_seconds", "They wait.", across=Across.MAX)
        self.sizes = metrics.histogram(f"{name}_sizes", "How large.", "kind", buckets=(1, 10))


@pytest.fixture
def trial() -> Iterator[Trial]:
    """Offer metrics to try; nothing is left on."""
    yield Trial()
    disable_metrics()


def teardown_module() -> None:
    """Take the metrics of this file out of the catalogue, which documents are checked against."""
    for name in [name for name in metrics._catalogue if name.startswith("holdfast_trial")]:
        del metrics._catalogue[name]


class Told:
    """What OpenTelemetry was told, when it asked."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def points(self, definition: MetricDefinition) -> list[Any]:
        """Return the data points of *definition*, as they are now."""
        return [] if (found := self.metric(definition)) is None else list(found.data.data_points)

    def metric(self, definition: MetricDefinition) -> Any:
        """Return the instrument of *definition*; None if it has told nothing."""
        data = self._reader.get_metrics_data()
        found = [
            metric
            for resource in ([] if data is None else data.resource_metrics)
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == definition.otel_name
        ]
        assert len(found) <= 1
        return found[0] if found else None


def test_one_declaration_makes_the_same_figures_for_both(trial: Trial) -> None:
    """A counter, a gauge and a histogram: names, labels, units, buckets and values."""
    registry, told = CollectorRegistry(), Told()
    made = Instruments(registry)
    placed, waiting, sizes = (
        made.counter(trial.placed),
        made.gauge(trial.waiting),
        made.histogram(trial.sizes),
    )
    placed.labels("north", "toy").inc(3)  # before it is on: a counter is not begun anew
    enable_metrics(told.provider)
    waiting.set(7.5)
    for size in (1, 5, 50):
        sizes.labels("toy").observe(size)
    text = exposition([registry]).body.decode().splitlines()
    name = f"holdfast_trial{trial.number}"
    assert f'{name}_placed_total{{kind="toy",shop_name="north"}} 3.0' in text
    assert f"{name}_waiting_seconds 7.5" in text
    assert f'{name}_sizes_bucket{{kind="toy",le="10.0"}} 2.0' in text

    counted = told.metric(trial.placed)
    assert (counted.description, counted.data.is_monotonic) == ("Orders placed.", True)
    (point,) = counted.data.data_points
    assert (dict(point.attributes), point.value) == ({"shop.name": "north", "kind": "toy"}, 3)
    gauge = told.metric(trial.waiting)
    assert (gauge.unit, [one.value for one in gauge.data.data_points]) == ("s", [7.5])
    (spread,) = told.points(trial.sizes)
    assert (tuple(spread.explicit_bounds), tuple(spread.bucket_counts)) == ((1, 10), (1, 1, 1))
    assert (spread.sum, dict(spread.attributes)) == (56, {"kind": "toy"})


def test_an_empty_label_is_none_for_opentelemetry(trial: Trial) -> None:
    """As an error's type where there was no error."""
    told, made = Told(), Instruments(CollectorRegistry())
    placed, sizes = made.counter(trial.placed), made.histogram(trial.sizes)
    enable_metrics(told.provider)
    placed.labels("north", "").inc()
    sizes.labels("").observe(1)
    assert [dict(one.attributes) for one in told.points(trial.placed)] == [{"shop.name": "north"}]
    assert [dict(one.attributes) for one in told.points(trial.sizes)] == [{}]


def test_owners_are_told_apart_and_what_they_share_becomes_one_figure(trial: Trial) -> None:
    """Counters add up; what the tables say is the same from everybody."""
    told = Told()
    owners = [Instruments(CollectorRegistry(), group=name) for name in ("a", "a", "b")]
    counters = [owner.counter(trial.placed) for owner in owners]
    gauges = [owner.gauge(trial.waiting) for owner in owners]
    for number, (counter, gauge) in enumerate(zip(counters, gauges, strict=True), 1):
        counter.labels("north", "toy").inc(number)
        gauge.set(number)
    enable_metrics(told.provider)
    placed = {one.attributes["group"]: one.value for one in told.points(trial.placed)}
    waits = {one.attributes["group"]: one.value for one in told.points(trial.waiting)}
    assert (placed, waits) == ({"a": 3, "b": 3}, {"a": 2, "b": 3})


def test_a_metric_that_is_declared_later_is_told_as_well(trial: Trial) -> None:
    """A program loads its modules when it needs them."""
    told = Told()
    enable_metrics(told.provider)
    late = metrics.counter(f"holdfast_trial{trial.number}_late", "Declared late.")
    made = Instruments(CollectorRegistry()).counter(late)
    made.inc()
    assert [one.value for one in told.points(late)] == [1]


def test_off_tells_nothing_and_on_again_goes_on(trial: Trial) -> None:
    """With the instruments that are there: nothing is told twice."""
    told, made = Told(), Instruments(CollectorRegistry())
    placed, sizes = made.counter(trial.placed), made.histogram(trial.sizes)
    enable_metrics(told.provider)
    placed.labels("north", "toy").inc()
    sizes.labels("toy").observe(1)
    disable_metrics()
    assert metrics.recorders == {}
    sizes.labels("toy").observe(1)
    assert told.points(trial.placed) == []
    enable_metrics(told.provider)
    assert [one.value for one in told.points(trial.placed)] == [1]
    assert [one.count for one in told.points(trial.sizes)] == [1]


def test_what_nobody_uses_any_more_is_not_told(trial: Trial) -> None:
    """A consumer that is gone leaves no figure behind."""
    told = Told()
    made = Instruments(CollectorRegistry()).gauge(trial.waiting)
    made.set(3)
    enable_metrics(told.provider)
    assert told.points(trial.waiting)
    del made
    gc.collect()
    assert told.points(trial.waiting) == []


@pytest.mark.programs
def test_off_loads_nothing_of_opentelemetrys_metrics() -> None:
    """A consumer and a relay that nobody asked to tell more."""
    code = (
        "import sys, holdfast.consumer, holdfast.outbox.relay.service, holdfast.dlq\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_two_declarations_of_one_name_must_agree() -> None:
    """Or the series would have two meanings."""
    assert metrics.counter("holdfast_trial_twice", "One.") == metrics.counter(
        "holdfast_trial_twice", "One."
    )
    with pytest.raises(ConfigurationError, match="declared twice"):
        metrics.counter("holdfast_trial_twice", "Another.")


@pytest.mark.parametrize(
    ("name", "otel", "unit"),
    [
        ("holdfast_dlq_write_failures", "holdfast.dlq.write_failures", ""),
        ("holdfast_dlq_oldest_seconds", "holdfast.dlq.oldest_seconds", "s"),
        ("holdfast_slot_retained_bytes", "holdfast.slot.retained_bytes", "By"),
        ("holdfast_sagas", "holdfast.sagas", ""),
    ],
)
def test_names_for_opentelemetry_are_dotted_and_know_their_unit(
    name: str, otel: str, unit: str
) -> None:
    """A name that says its unit keeps it, or two series would share one."""
    made = MetricDefinition(name=name, kind=MetricKind.GAUGE, help="")
    assert (made.otel_name, made.otel_unit) == (otel, unit)


def test_a_label_has_so_many_values_and_no_more() -> None:
    """What came first keeps its name; a long one is cut."""
    label = BoundedLabel(2, other="_OTHER")
    assert [label(word) for word in ("a", "b", "c", "a", "d")] == [
        "a",
        "b",
        "_OTHER",
        "a",
        "_OTHER",
    ]
    assert len(BoundedLabel(1)("x" * 10_000)) == 200


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_label_that_is_no_text_does_not_cost_the_page(accept: str) -> None:
    """Foreign text becomes labels: whoever sends it must not blind the operator."""
    registry = CollectorRegistry()
    counted = Counter("hostile", "Anything.", ["name"], registry=registry)
    for value in ("\ud800", "\udfff", "grün", "plain"):
        counted.labels(value).inc()
    counted.labels(BoundedLabel(9)("\ud801")).inc()
    body = exposition([registry], accept).body.decode()
    for shown in (r"\\ud800", r"\\udfff", r"\\ud801", "grün", "plain"):
        assert f'hostile_total{{name="{shown}"}} 1.0' in body


def exemplars(body: str) -> list[dict[str, str]]:
    """Return the exemplars on a page of OpenMetrics."""
    return [
        sample.exemplar.labels
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.exemplar is not None
    ]


def test_an_observation_is_linked_to_the_trace_in_which_it_was_made(trial: Trial) -> None:
    """For Prometheus, if it asks for OpenMetrics, and for OpenTelemetry."""
    registry, told = CollectorRegistry(), Told()
    sizes = Instruments(registry).histogram(trial.sizes)
    enable_metrics(told.provider)
    provider = TracerProvider()
    span = Spans(provider.get_tracer("test"), parent=False).process(
        "orders", [], group="g", system="kafka", attempt=1
    )
    link = span.link()
    assert link is not None
    sizes.labels("toy").observe(5, span.link)
    span.end("handled")
    assert span.link() is None  # nobody records it any more
    shown = exposition([registry], OPENMETRICS)
    assert shown.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert exemplars(shown.body.decode()) == [link.labels]
    (point,) = told.points(trial.sizes)
    (found,) = point.exemplars
    assert f"{found.trace_id:032x}" == link.labels["trace_id"]
    assert f"{found.span_id:016x}" == link.labels["span_id"]


def test_a_span_that_nobody_records_links_nothing() -> None:
    """A trace that was not sampled cannot be found."""
    provider = TracerProvider(sampler=ALWAYS_OFF)
    span = Spans(provider.get_tracer("test"), parent=False).process(
        "orders", [], group="g", system="kafka", attempt=1
    )
    assert span.link() is None


def test_the_text_format_is_as_before_unless_openmetrics_is_asked_for(trial: Trial) -> None:
    """It knows no exemplars, and every reader knows it."""
    registry = CollectorRegistry()
    sizes = Instruments(registry).histogram(trial.sizes)
    sizes.labels("toy").observe(5, lambda: TraceLink({"trace_id": "ab"}, None))
    for accept in ("", "*/*", "text/html"):
        shown = exposition([registry], accept)
        assert shown.content_type == METRICS_TYPE
        assert "trace_id" not in shown.body.decode()
        assert list(text_families(shown.body.decode()))


def test_a_histogram_shows_every_observation_of_every_thread(trial: Trial) -> None:
    """Also of a series that several threads are the first to name."""
    registry = CollectorRegistry()
    sizes = Instruments(registry).histogram(trial.sizes)
    together = threading.Barrier(8)

    def observe() -> None:
        together.wait()
        for kind in ("toy", "book", "game"):
            for size in (1, 5, 50):
                sizes.labels(kind).observe(size)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in ("toy", "book", "game"):
        shown = {
            le: registry.get_sample_value(f"{trial.sizes.name}_bucket", {"kind": kind, "le": le})
            for le in ("1.0", "10.0", "+Inf")
        }
        assert shown == {"1.0": 8, "10.0": 16, "+Inf": 24}
        assert registry.get_sample_value(f"{trial.sizes.name}_count", {"kind": kind}) == 24
        assert registry.get_sample_value(f"{trial.sizes.name}_sum", {"kind": kind}) == 8 * 56


_SHARED = """
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from holdfast import metrics

declared = metrics.histogram("shared_sizes", "How large.", "kind", buckets=(1, 10))
metrics.Instruments(CollectorRegistry()).histogram(declared).labels("toy").observe(5)
together = CollectorRegistry()
MultiProcessCollector(together)
print(together.get_sample_value("shared_sizes_bucket", {"kind": "toy", "le": "10.0"}))
"""


@pytest.mark.programs
def test_processes_that_share_figures_by_files_share_histograms(tmp_path: Path) -> None:
    """As the workers of an application server do, with `PROMETHEUS_MULTIPROC_DIR`."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SHARED], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1.0"]


def test_several_registries_are_one_page(trial: Trial) -> None:
    """With one end, and with each name once."""
    first, second = CollectorRegistry(), CollectorRegistry()
    for registry in (first, second):
        Instruments(registry).counter(trial.placed).labels(f"shop{id(registry)}", "toy").inc()
    Counter("app_things", "An application's own.", registry=second).inc()
    body = exposition([first, second], OPENMETRICS).body.decode()
    assert body.count("# EOF") == body.count(f"# TYPE {trial.placed.name} counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(body)}
    totals = [one for one in families[trial.placed.name].samples if "total" in one.name]
    assert len(totals) == 2
    assert "app_things" in families


def test_what_openmetrics_cannot_say_is_said_in_the_text_format() -> None:
    """An odd metric of the application hides none of the others."""
    registry = CollectorRegistry()
    Info("app", "About the application.", registry=registry).info({"version": "1"})

    class Odd:
        def collect(self) -> Any:
            for family in registry.collect():
                odd = type(family)(family.name, family.documentation, family.type)
                odd.add_sample("app_info", {}, 1.0, exemplar=_exemplar())
                yield odd

    shown = exposition([Odd()], OPENMETRICS)
    assert shown.content_type == METRICS_TYPE
    assert b"app_info" in shown.body


def _exemplar() -> Any:
    from prometheus_client.core import Exemplar

    return Exemplar({"trace_id": "ab"}, 1.0)
