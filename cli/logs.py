"""Logs on stderr: JSON for machines, lines for people, secrets in neither; and their options."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer

from holdfast.cli.display import plain
from holdfast.tracing.logs import JsonFormatter, LogContext, moment, shown

_CLIENTS = ("kafka", "pika", "nats")
"""What these tell, and often and unmasked, their adapters tell once and in a sentence."""


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


class TextFormatter(logging.Formatter):
    """One line per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as a line."""
        text = plain(shown(record.getMessage()))
        line = f"{moment(record)} {record.levelname:<7} {record.name}: {text}"
        if record.exc_info:
            line += "\n" + plain(shown(self.formatException(record.exc_info)), lines=True)
        return line


def configure(form: LogFormat, level: LogLevel) -> None:
    """Send all logs to stderr; on a terminal people are assumed to read them."""
    if form is LogFormat.AUTO:
        form = LogFormat.TEXT if sys.stderr.isatty() else LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    if form is LogFormat.JSON:
        handler.addFilter(LogContext())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("holdfast").setLevel(level.name)
    for client in _CLIENTS:
        logging.getLogger(client).setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """Where and how much a service logs."""

    log_format: Annotated[
        LogFormat,
        typer.Option(
            envvar="HOLDFAST_LOG_FORMAT", help="auto is text on a terminal and JSON elsewhere."
        ),
    ] = LogFormat.AUTO
    log_level: Annotated[
        LogLevel, typer.Option(envvar="HOLDFAST_LOG_LEVEL", help="The least level to log.")
    ] = LogLevel.INFO

    def configure(self, *, as_json: bool) -> LogFormat:
        """Log so from now on, as JSON if scripts read; return the format."""
        chosen = LogFormat.JSON if as_json else self.log_format
        configure(chosen, self.log_level)
        return chosen
