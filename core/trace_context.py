"""The W3C trace context of the code that runs now, told by OpenTelemetry."""

from __future__ import annotations

import sys
from typing import Any


def current_traceparent() -> str | None:
    """Return the `traceparent` of the current span, None where nobody traces.

    A program that traces has imported OpenTelemetry; for the others it stays unloaded.
    """
    tracing: Any = sys.modules.get("opentelemetry.trace")
    if tracing is None or not hasattr(tracing, "get_current_span"):
        return None
    span = tracing.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
