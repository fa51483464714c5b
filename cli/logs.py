"""Logs on stderr: JSON for machines, lines for people, secrets in neither."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import Enum

from holdfast.cli.display import plain
from holdfast.scrubbing import scrubbed
from holdfast.urls import is_secret

MOST_TEXT = 16_000
"""Characters of a message or a traceback that are written."""
_CLIENTS = ("kafka", "pika", "nats")
"""What these tell, and often and unmasked, their adapters tell once and in a sentence."""
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogFormat(Enum):
    """How log records are written."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


class LogLevel(Enum):
    """How much of Holdfast's own logs is written; other libraries log warnings only."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra=` fields become members."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as JSON."""
        entry: dict[str, object] = {
            "time": _moment(record),
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


class TextFormatter(logging.Formatter):
    """One line per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as a line."""
        text = plain(shown(record.getMessage()))
        line = f"{_moment(record)} {record.levelname:<7} {record.name}: {text}"
        if record.exc_info:
            line += "\n" + plain(shown(self.formatException(record.exc_info)), lines=True)
        return line


def configure(form: LogFormat, level: LogLevel) -> None:
    """Send all logs to stderr; on a terminal people are assumed to read them."""
    if form is LogFormat.AUTO:
        form = LogFormat.TEXT if sys.stderr.isatty() else LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("holdfast").setLevel(level.name)
    for client in _CLIENTS:
        logging.getLogger(client).setLevel(logging.CRITICAL)


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
