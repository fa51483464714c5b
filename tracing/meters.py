"""Holdfast's metrics for OpenTelemetry: every declared metric as an instrument of one meter.

Counters and gauges are observable: they are read from where they are counted anyway, and only
when somebody collects. Histograms are told each value, with the span in which it was measured.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics as otel
from opentelemetry.metrics import Observation

from holdfast import metrics
from holdfast.metrics import MetricDefinition, MetricKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider


class Meters:
    """The instruments that one provider was given; they tell nothing while they are off."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known: dict[str, Any] = {}
        self._is_on = False

    def start(self) -> None:
        """Tell every metric from now on, those of modules that are loaded later as well."""
        self._is_on = True
        metrics.listen(self._add)

    def stop(self) -> None:
        """Tell nothing from now on."""
        self._is_on = False
        metrics.unlisten(self._add)
        for name in self._known:
            metrics.recorders.pop(name, None)

    def _add(self, definition: MetricDefinition) -> None:
        made = self._known.get(definition.name)
        if made is None:
            made = self._known[definition.name] = self._made(definition)
        if definition.kind is MetricKind.HISTOGRAM:
            metrics.recorders[definition.name] = made.record

    def _made(self, definition: MetricDefinition) -> Any:
        name, about = definition.otel_name, (definition.otel_unit, definition.help)
        observed = [partial(self._observed, definition)]
        match definition.kind:
            case MetricKind.COUNTER:
                return self._meter.create_observable_counter(name, observed, *about)
            case MetricKind.GAUGE:
                return self._meter.create_observable_gauge(name, observed, *about)
            case MetricKind.HISTOGRAM:
                return self._meter.create_histogram(
                    name, *about, explicit_bucket_boundaries_advisory=definition.buckets
                )

    def _observed(
        self, definition: MetricDefinition, _options: CallbackOptions
    ) -> Iterable[Observation]:
        if not self._is_on:
            return []
        found = metrics.figures(definition)
        return [Observation(value, dict(labels)) for labels, value in found.items()]


_used: WeakKeyDictionary[MeterProvider, Meters] = WeakKeyDictionary()


def meters_of(provider: MeterProvider | None) -> Meters:
    """Return the instruments of *provider*, or of the one that the program has set.

    They are made once: a provider that was told to before goes on with them.
    """
    chosen = otel.get_meter_provider() if provider is None else provider
    found = _used.get(chosen)
    if found is None:
        found = _used[chosen] = Meters(chosen.get_meter("holdfast"))
    return found
