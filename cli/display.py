"""What the command prints: safe for a terminal, stable for a script."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

out = Console()
err = Console(stderr=True)

_EXCERPT = 2000


def plain(text: str, *, lines: bool = False) -> str:
    """Return *text* without anything that a terminal would obey.

    Control characters, escape sequences and marks that turn the reading direction come
    out as their codes. With *lines*, line ends and tabs stay.
    """
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _code(char) for char in text)


def _code(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def excerpt(payload: bytes | None, *, most: int = _EXCERPT) -> str:
    """Return the start of *payload* for people: text if it is UTF-8, base64 if not."""
    if payload is None:
        return "(none: a tombstone)"
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = f"base64: {base64.b64encode(payload[:most]).decode()}"
        cut = len(payload) > most
    else:
        cut = len(text) > most
        text = plain(text[:most], lines=True)
    return f"{text}… ({len(payload):,} bytes in all)" if cut else text


def encoded(payload: bytes | None) -> dict[str, Any]:
    """Return *payload* for scripts: `text` if it is UTF-8, `base64` if not."""
    if payload is None:
        return {"text": None}
    try:
        return {"text": payload.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}


def print_json(value: Any) -> None:
    """Print *value* as JSON in pure ASCII: nothing in it reaches the terminal unescaped."""
    typer.echo(json.dumps(value, indent=2, default=_json).replace("\x7f", "\\u007f"))


def _json(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    whole: int = 1,
) -> None:
    """Print *rows* as a table; markup and escapes in them have no effect.

    The first *whole* columns, names that people type, are not cut on a narrow terminal;
    columns of numbers are flush right.
    """
    cells = [[plain(_written(cell)) for cell in row] for row in rows]
    columns = [Column(name, no_wrap=place < whole) for place, name in enumerate(headings)]
    for column, texts in zip(columns, zip(*cells, strict=True), strict=bool(cells)):
        if all(text.replace(",", "").isdigit() for text in texts):
            column.justify = "right"
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*map(Text, row))
    out.print(table)


def _written(cell: object) -> str:
    if type(cell) is int:
        return f"{cell:,}"
    return "" if cell is None else str(cell)


def answer(text: str, facts: dict[str, Any], *, as_json: bool) -> None:
    """Say what was done: in a sentence to people, as *facts* to a script."""
    if as_json:
        print_json(facts)
    else:
        say(text)


def foreign(text: str) -> str:
    """Return *text* with all but its first line marked: what others wrote is no line of ours."""
    return text.replace("\r\n", "\n").replace("\n", "\n  | ")


def say(text: str) -> None:
    """Print a line that may hold foreign text."""
    out.print(Text(plain(text, lines=True)), soft_wrap=True)
