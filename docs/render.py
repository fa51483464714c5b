"""Writes the capability table of docs/brokers.md from what the adapters declare.

Usage: python docs/render.py
"""

from __future__ import annotations

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.brokers import connect
from holdfast.ports import Caps

PAGE = Path(__file__).parent / "brokers.md"
_DAY = 86_400
SHOWN = {
    "memory": "memory:",
    "SQLite": "sqlite:///{folder}/render.db",
    "Kafka": "kafka://localhost:9092",
    "Kafka (confluent)": "kafka+confluent://localhost:9092",
    "RabbitMQ": "amqp://localhost",
    "Redis Streams": "redis://localhost",
    "NATS JetStream": "nats://localhost",
}


def table() -> str:
    """Return the table in Markdown: a row per capability, a column per broker."""
    with TemporaryDirectory() as folder:
        caps = {name: _caps(url.format(folder=folder)) for name, url in SHOWN.items()}
    lines = [f"| | {' | '.join(caps)} |", "|---" * (len(caps) + 1) + "|"]
    for field in fields(Caps):
        cells = [_cell(getattr(declared, field.name)) for declared in caps.values()]
        lines.append(f"| `{field.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with a fresh table."""
    mark = re.compile(r"(<!-- caps -->\n).*?(<!-- /caps -->)", re.DOTALL)
    text, found = mark.subn(lambda match: f"{match[1]}{table()}\n{match[2]}", PAGE.read_text())
    if found != 1:
        raise SystemExit(f"{PAGE} has no place for the table: <!-- caps --> and <!-- /caps -->")
    return text


def _caps(url: str) -> Caps:
    broker = connect(url)
    broker.close()
    return broker.caps


def _cell(value: object) -> str:
    match value:
        case Enum():
            return str(value.value)
        case bool():
            return "yes" if value else "–"
        case None:
            return "–"
        case float() if value == float("inf"):
            return "any"
        case float() if value >= _DAY:
            return f"{value / _DAY:g} d"
        case float():
            return f"{value:g} s"
        case _:
            return f"{value:,}"


if __name__ == "__main__":
    PAGE.write_text(page())
