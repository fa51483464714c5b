"""Log lines that say what they belong to: the message, its correlation, the trace.

`LogContext` adds that to the records of any handler of the user's own logging set-up;
`JsonFormatter` writes a record as one line of JSON. Neither ever writes a payload.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.message import (
    current_list,
    current_message,
    current_origin,
    handling_since,
    note_handling_times,
)
from holdfast.scrubbing import scrubbed
from holdfast.urls import is_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.message import Message

MOST_LISTED = 10
"""Ids of a list of messages that a line names."""
MOST_TEXT = 16_000
"""Characters of a message or a traceback that are written."""
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogContext(logging.Filter):
    """Adds to every record what it belongs to; it never holds one back.

    Within a handler: `message_id`, `event_type`, `topic`, `correlation_id`, `causation_id` and
    `duration_ms`, the time since the handling began. Within a handler of lists: `messages`, how
    many, with the first `MOST_LISTED` of `message_ids`, `correlation_ids` and `event_types`.
    Within a request: `correlation_id`. With
    OpenTelemetry: `trace_id` and `span_id`. Everywhere: `service`, which is *service* or
    `OTEL_SERVICE_NAME`. What a record has already stays as it is.

    ```python
    handler = logging.StreamHandler()
    handler.addFilter(LogContext(service="billing"))
    ```
    """

    def __init__(self, *, service: str | None = None) -> None:
        super().__init__()
        self._service = service or os.environ.get("OTEL_SERVICE_NAME") or None
        note_handling_times()

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to *record*."""
        known = record.__dict__
        for name, value in self._fields(record):
            if value is not None and known.get(name) is None:
                known[name] = value
        return True

    def _fields(self, record: logging.LogRecord) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [("service", self._service), *_span()]
        message = current_message()
        if message is not None:
            found += [
                ("message_id", message.id), ("event_type", message.type), ("topic", message.topic),
                ("correlation_id", message.correlation_id), ("causation_id", message.causation_id),
            ]  # fmt: skip
        elif several := current_list():
            found += _of_list(several)
        else:
            origin = current_origin()
            if origin is not None:
                found.append(("correlation_id", origin.correlation_id))
            return found
        since = handling_since()
        if since is not None:
            found.append(("duration_ms", round((time.monotonic() - since) * 1000, 1)))
        return found


def _of_list(messages: tuple[Message, ...]) -> list[tuple[str, Any]]:
    """Return what a line within a handler of lists belongs to: bounded, and each name once."""

    def named(values: Iterable[str | None]) -> list[str]:
        return [*islice(dict.fromkeys(one for one in values if one is not None), MOST_LISTED)]

    return [
        ("messages", len(messages)), ("topic", messages[0].topic),
        ("message_ids", named(one.id for one in messages)),
        ("event_types", named(one.type for one in messages)),
        ("correlation_ids", named(one.correlation_id for one in messages)),
    ]  # fmt: skip


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra=` fields become members, secrets are masked."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as JSON."""
        entry: dict[str, object] = {
            "time": moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shown(record.getMessage()),
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                entry[name] = "***" if is_secret(name) else _masked(value)
        if record.exc_info:
            entry["exception"] = shown(self.formatException(record.exc_info))
        return json.dumps(entry, default=str)


def setup_logging(*, service: str | None = None, level: int | str = logging.INFO) -> None:
    """Send all logs to stderr, a line of JSON each, with what they belong to.

    For a service that has no logging set-up of its own; one that has adds `LogContext` to it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(LogContext(service=service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def moment(record: logging.LogRecord) -> str:
    """Return when *record* was made, as RFC 3339 writes it."""
    made = datetime.fromtimestamp(record.created, UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(text: str) -> str:
    """Return *text* as a log may hold it: bounded, its begin and its end, without secrets."""
    left_out = len(text) - MOST_TEXT
    if left_out <= 0:
        return scrubbed(text, most=MOST_TEXT)
    half = MOST_TEXT // 2
    begin, end = scrubbed(text[:half], most=half), scrubbed(text[-half:], most=half)
    return f"{begin}… ({left_out:,} characters left out) …{end}"


def _masked(value: object) -> object:
    return shown(value) if isinstance(value, str) else value


def _span() -> list[tuple[str, str]]:
    """Return the ids of the current span; a program that traces has imported OpenTelemetry."""
    tracing: Any = sys.modules.get("opentelemetry.trace")
    if tracing is None or not hasattr(tracing, "get_current_span"):
        return []
    span = tracing.get_current_span().get_span_context()
    if not span.is_valid:
        return []
    return [("trace_id", f"{span.trace_id:032x}"), ("span_id", f"{span.span_id:016x}")]
