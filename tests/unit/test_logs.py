"""Logs: one JSON object per record, without secrets."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from holdfast.cli.display import excerpt, plain
from holdfast.cli.logs import TextFormatter
from holdfast.tracing import JsonFormatter

SECRET = "kafka://user:hunter2@host:9092"


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    """Make a record as a logger would."""
    logger = logging.getLogger("holdfast.test")
    error = extra.pop("error", None)
    info = None if error is None else (type(error), error, error.__traceback__)
    return logger.makeRecord("holdfast.test", logging.WARNING, "f", 1, message, args, info,
                             extra=extra)  # fmt: skip


def test_a_record_is_one_line_of_json() -> None:
    """Line ends in a message do not break the line; extra fields are members."""
    line = JsonFormatter().format(record("two\nlines %d", 7, shard=3))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "two\nlines 7"
    assert (entry["level"], entry["logger"], entry["shard"]) == ("warning", "holdfast.test", 3)
    assert entry["time"].endswith("Z")


def test_secrets_are_masked_wherever_they_stand() -> None:
    """In messages, in fields and in tracebacks, in both formats."""
    try:
        raise ValueError(SECRET)  # noqa: TRY301
    except ValueError as error:
        made = record("to %s", SECRET, url=SECRET, api_token="hunter2", error=error)
    for formatter in (JsonFormatter(), TextFormatter()):
        assert "hunter2" not in formatter.format(made)
    assert sys.exc_info() == (None, None, None)


def test_a_message_cannot_forge_a_line_or_command_the_terminal() -> None:
    """A key that holds a line end or an escape is written as its codes."""
    line = TextFormatter().format(record("key %s", "a\n2026-01-01 forged\x1b[2J"))
    assert "\n" not in line
    assert "\x1b" not in line


def test_plain_text_keeps_what_people_write() -> None:
    """Letters of any script stay; what a terminal obeys or hides does not."""
    assert plain("Grüße, 世界 – 100 %") == "Grüße, 世界 – 100 %"
    assert plain("a\x1b[31m\r\x7f\u202eb\ud800") == r"a\x1b[31m\r\x7f\u202eb\ud800"
    assert plain("a\nb\tc", lines=True) == "a\nb\tc"


def test_an_excerpt_says_what_it_left_out() -> None:
    """Long and binary payloads are cut and coded."""
    assert excerpt(None) == "(none: a tombstone)"
    assert excerpt(b"") == ""
    assert excerpt(b"x" * 30, most=10) == "xxxxxxxxxx… (30 bytes in all)"
    assert excerpt(b"\xff\x00") == "base64: /wA="
