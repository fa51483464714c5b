"""Writes the capability table of docs/brokers.md from what the adapters declare.

Usage: python docs/render.py
"""

from __future__ import annotations

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path

from holdfast.brokers import connect
from holdfast.caps import Caps

PAGE = Path(__file__).parent / "brokers.md"
SHOWN = {
    "memory": "memory:",
    "SQLite": "sqlite:////tmp/holdfast-render.db",
    "Kafka": "kafka://localhost:9092",
    "RabbitMQ": "amqp://localhost",
    "Redis Streams": "redis://localhost",
    "NATS JetStream": "nats://localhost",
}


def table() -> str:
    """Return the table in Markdown: a row per capability, a column per broker."""
    caps = {name: _caps(url) for name, url in SHOWN.items()}
    lines = [f"| | {' | '.join(caps)} |", "|---" * (len(caps) + 1) + "|"]
    for field in fields(Caps):
        cells = [_cell(getattr(declared, field.name)) for declared in caps.values()]
        lines.append(f"| `{field.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with a fresh table."""
    mark = re.compile(r"(<!-- caps -->\n).*?(\n<!-- /caps -->)", re.DOTALL)
    return mark.sub(lambda match: match[1] + table() + match[2], PAGE.read_text())


def _caps(url: str) -> Caps:
    broker = connect(url)
    declared = broker.caps
    broker.close()
    if url.startswith("sqlite:"):
        Path(url.removeprefix("sqlite:///")).unlink()
    return declared


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
        case float():
            return f"{value:g} s"
        case _:
            return f"{value:,}"


if __name__ == "__main__":
    PAGE.write_text(page())
