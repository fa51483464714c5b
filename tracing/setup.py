"""Tracing and metrics as the standard `OTEL_*` variables ask; for services and sidecars."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError
from holdfast.extras import driver
from holdfast.ids import new_id
from holdfast.tracing import switch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.resources import Resource

_OTLP = "opentelemetry.exporter.otlp.proto.http"
_SIGNALS = {
    "TRACES": (f"{_OTLP}.trace_exporter:OTLPSpanExporter",
               "opentelemetry.sdk.trace.export:ConsoleSpanExporter"),
    "METRICS": (f"{_OTLP}.metric_exporter:OTLPMetricExporter",
                "opentelemetry.sdk.metrics.export:ConsoleMetricExporter"),
}  # fmt: skip


def setup(*, service: str | None = None, parent: bool = False) -> None:
    """Export spans and metrics as `OTEL_*` say, from now on: `pip install holdfast[otel]`.

    `OTEL_SERVICE_NAME` (or *service*), `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
    `OTEL_EXPORTER_OTLP_*`, `OTEL_METRIC_EXPORT_INTERVAL`, and `OTEL_TRACES_EXPORTER` and
    `OTEL_METRICS_EXPORTER` (`otlp`, `console` or `none`) count as everywhere. A program that has
    set providers of its own calls `enable()` and `enable_metrics()` instead.
    """
    _set_up(_SIGNALS, service=service, parent=parent)


def setup_if_asked(service: str) -> None:
    """Export what the environment names an exporter or an endpoint for; a sidecar is *service*."""
    asked = [signal for signal in _SIGNALS if _is_asked_for(signal)]
    _set_up(asked, service=None if os.environ.get("OTEL_SERVICE_NAME") else service)


def _is_asked_for(signal: str) -> bool:
    names = (f"OTEL_{signal}_EXPORTER", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT",
             "OTEL_EXPORTER_OTLP_ENDPOINT")  # fmt: skip
    return any(os.environ.get(name) for name in names)


def _set_up(signals: Any, *, service: str | None, parent: bool = False) -> None:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    exporters = {signal: [_exporter(signal, name) for name in _named(signal)] for signal in signals}
    if not any(exporters.values()):
        return
    # Without a name of its own, the figures of two processes would look like those of one.
    facts = {"service.instance.id": new_id()}
    if service is not None:
        facts["service.name"] = service
    resource = driver("opentelemetry.sdk.resources", extra="otel").Resource.create(_new(facts))
    if traced := exporters.get("TRACES"):
        _trace(traced, resource, parent=parent)
    if measured := exporters.get("METRICS"):
        _measure(measured, resource)


def _new(facts: Mapping[str, str]) -> dict[str, str]:
    """Return those of *facts* that the environment does not state itself."""
    said = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    stated = {pair.partition("=")[0].strip() for pair in said.split(",")}
    return {name: value for name, value in facts.items() if name not in stated}


def _trace(exporters: list[Any], resource: Resource, *, parent: bool) -> None:
    from opentelemetry import trace

    sdk = driver("opentelemetry.sdk.trace", extra="otel")
    export = driver("opentelemetry.sdk.trace.export", extra="otel")
    provider = sdk.TracerProvider(resource=resource)
    for exporter in exporters:
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    switch.enable(provider, parent=parent)


def _measure(exporters: list[Any], resource: Resource) -> None:
    from opentelemetry import metrics

    sdk = driver("opentelemetry.sdk.metrics", extra="otel")
    export = driver("opentelemetry.sdk.metrics.export", extra="otel")
    readers = [export.PeriodicExportingMetricReader(exporter) for exporter in exporters]
    provider = sdk.MeterProvider(readers, resource)
    metrics.set_meter_provider(provider)
    switch.enable_metrics(provider)


def _named(signal: str) -> list[str]:
    said = os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp")
    names = [name.strip().lower() for name in said.split(",") if name.strip()]
    return [name for name in names if name != "none"]


def _exporter(signal: str, name: str) -> Any:
    otlp, console = _SIGNALS[signal]
    if name not in ("otlp", "console"):
        raise ConfigurationError(f"OTEL_{signal}_EXPORTER={name!r}: use otlp, console or none")
    if name == "otlp":
        _check_protocol()
    module, _, kind = (otlp if name == "otlp" else console).partition(":")
    return getattr(driver(module, extra="otel"), kind)()


def _check_protocol() -> None:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigurationError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: use http/protobuf, or set up a provider of "
            "your own and call holdfast.tracing.enable()"
        )
