"""Whether spans are made and metrics told, and by what; light, since everybody looks here first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from holdfast.tracing.meters import Meters
    from holdfast.tracing.spans import Spans

spans: Spans | None = None
"""What makes spans; None while tracing is off."""
meters: Meters | None = None
"""What tells metrics to OpenTelemetry; None while that is off. Prometheus has them always."""


def enable(provider: TracerProvider | None = None, *, parent: bool = False) -> None:
    """Make spans from now on, by *provider* or by the one that the program has set.

    With *parent* the span in which a single message is handled is a child of the one that created
    the message, so that both are in one trace. Otherwise it links to it.
    """
    global spans  # noqa: PLW0603 - one switch for the process
    from opentelemetry import trace

    from holdfast.tracing.spans import Spans

    spans = Spans(trace.get_tracer("holdfast", tracer_provider=provider), parent=parent)


def disable() -> None:
    """Make no spans from now on."""
    global spans  # noqa: PLW0603
    spans = None


def enable_metrics(provider: MeterProvider | None = None) -> None:
    """Tell Holdfast's metrics to *provider*, or to the one that the program has set, from now on.

    Prometheus is shown the same figures as before.
    """
    global meters  # noqa: PLW0603 - one switch for the process
    from holdfast.tracing.meters import meters_of

    disable_metrics()
    meters = meters_of(provider)
    meters.start()


def disable_metrics() -> None:
    """Tell OpenTelemetry no metrics from now on."""
    global meters  # noqa: PLW0603
    if meters is not None:
        meters.stop()
        meters = None


def quiet() -> AbstractContextManager[None]:
    """Return a block in which instrumentation of client libraries makes no spans beside ours."""
    if spans is None:
        return nullcontext()
    from holdfast.tracing.spans import quiet

    return quiet()


def system_of(adapter: object) -> str:
    """Return the name of the broker that *adapter* is for: of the package that it is from."""
    package, _, rest = type(adapter).__module__.partition(".")
    if package != "holdfast":
        return package
    name = rest.removeprefix("brokers.").partition(".")[0]
    return "holdfast" if name == "embedded" or not rest.startswith("brokers.") else name
