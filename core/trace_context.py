"""The W3C trace context of the code that runs now, told by OpenTelemetry."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Trace(NamedTuple):
    """The two headers of W3C: where in which trace, and what tracing systems add to that."""

    parent: str | None = None
    state: str | None = None


NO_TRACE = Trace()


def current_trace() -> Trace:
    """Return the trace context of the current span, `NO_TRACE` where nobody traces.

    A program that traces has imported OpenTelemetry; for the others it stays unloaded.
    """
    tracing: Any = sys.modules.get("opentelemetry.trace")
    if tracing is None or not hasattr(tracing, "get_current_span"):
        return NO_TRACE
    span = tracing.get_current_span().get_span_context()
    if not span.is_valid:
        return NO_TRACE
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    state = span.trace_state
    return Trace(parent, state.to_header() if state else None)
