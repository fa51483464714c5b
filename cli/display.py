"""What the command prints: safe for a terminal, stable for a script, figures for people."""

from __future__ import annotations

import base64
import json
import re
import textwrap
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


_MOMENTS = frozenset(
    {"at", "first_seen", "last_seen", "muted_until", "next_retry", "since", "until"}
)


def print_json(value: Any, *, on_stderr: bool = False) -> None:
    """Print *value* as JSON in pure ASCII: nothing in it reaches the terminal unescaped.

    Moments are written as RFC 3339 has them, in UTC, also those that are stored as seconds.
    """
    text = json.dumps(_moments(value), indent=2, default=_json).replace("\x7f", "\\u007f")
    typer.echo(text, err=on_stderr)


def _moments(value: Any) -> Any:
    """Return *value* with seconds since 1970 as moments, wherever a member's name says so."""
    if isinstance(value, dict):
        return {
            name: rfc3339(one) if _is_moment(name, one) else _moments(one)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_moments(one) for one in value]
    return value


def _is_moment(name: object, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return name in _MOMENTS or str(name).endswith("_at")


def rfc3339(seconds: float) -> str:
    """Return a moment in UTC; one beyond the calendar, as another's clock may say, at its end."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        year = 9999 if seconds > 0 else 1
        moment = datetime(year, 1, 1, tzinfo=UTC)
    return _json(moment)


def _json(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    whole: int = 1,
    blocks: bool = False,
) -> None:
    """Print *rows* as a table; markup and escapes in them have no effect.

    The first *whole* columns, names that people type, are not cut on a narrow terminal, and
    nothing else is cut but goes on in the next line; columns of numbers are flush right. In
    *blocks*, a cell may have several lines, and a rule parts the rows.
    """
    cells = [[plain(_written(cell), lines=blocks) for cell in row] for row in rows]
    columns = [
        Column(name, no_wrap=place < whole, overflow="ellipsis" if place < whole else "fold")
        for place, name in enumerate(headings)
    ]
    for column, texts in zip(columns, zip(*cells, strict=True), strict=bool(cells)):
        if all(text.replace(",", "").isdigit() for text in texts):
            column.justify = "right"
    table = Table(*columns, title=title, show_lines=blocks)
    for row in cells:
        table.add_row(*map(Text, row))
    out.print(table)


def cut(text: str, most: int) -> str:
    """Return *text* in one line of at most *most* characters, for what another id names."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


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


_COMMAND = re.compile(r"(?:(?<=  )|(?<=: )|^)holdfast [a-z].*?(?=  |, |; |$)")


def say(text: str, *, indent: int = 0) -> None:
    """Print prose that may hold foreign text; what goes on in the next line stands at *indent*.

    On a terminal it breaks between words, and commands stay whole where they fit in a line. In a
    pipe a line stays a line.
    """
    for line in plain(text, lines=True).split("\n"):
        inner = len(line) - len(line.lstrip())
        for part in break_lines(line, max(indent, inner + 2 if inner else 0)):
            out.print(Text(part), soft_wrap=True)


def say_as_is(text: str) -> None:
    """Print what others wrote, which people copy: no line is broken."""
    out.print(Text(plain(text, lines=True)), soft_wrap=True)


def break_lines(line: str, indent: int = 0, *, on: Console = out) -> list[str]:
    """Return *line* as the lines of a terminal, of which all but the first begin at *indent*."""
    width = on.width
    if not on.is_terminal or cell_len(line) <= width:
        return [line]
    room = width - indent

    def whole(command: re.Match[str]) -> str:
        return command[0].replace(" ", "\0") if len(command[0]) <= room else command[0]

    broken = textwrap.wrap(
        _COMMAND.sub(whole, line),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [part.replace("\0", " ") for part in broken]


def note(text: str) -> None:
    """Tell people something on the side: standard output stays a script's alone."""
    for line in plain(text, lines=True).split("\n"):
        for part in break_lines(line, on=err):
            err.print(Text(part), soft_wrap=True)


_LEVELS = "▁▂▃▄▅▆▇█"
_BAR = 16


def age(seconds: float | None) -> str:
    """Return *seconds* in the largest units that say something."""
    if seconds is None:
        return "–"
    left = int(max(0.0, seconds))
    for unit, size, next_unit, next_size in (
        ("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1),
    ):  # fmt: skip
        if left >= size:
            rest = left % size // next_size
            return f"{left // size}{unit} {rest}{next_unit}" if rest else f"{left // size}{unit}"
    return f"{left}s"


def ago(moment: float, now: float) -> str:
    """Return how long ago *moment* was; a clock ahead of ours makes it "now"."""
    return "now" if now - moment < 1 else f"{age(now - moment)} ago"


def when(moment: float | None) -> str:
    """Return *moment* in UTC; one that has no date, as another's clock may say, as it is."""
    if moment is None:
        return "–"
    try:
        return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{moment:g} s since 1970"


def sparkline(counts: Sequence[int]) -> str:
    """Return *counts* as a line of small columns."""
    most = max(counts, default=0)
    if most == 0:
        return "·" * len(counts)
    return "".join(
        "·" if count == 0 else _LEVELS[(count * (len(_LEVELS) - 1)) // most] for count in counts
    )


def hour_marks(now: float, *, hours: int = 24) -> str:
    """Return the line under a `sparkline` of *hours*: every sixth hour of the day, in UTC.

    A mark begins under the column of its hour; the last column is the hour of *now*.
    """
    last = int(now // 3600)
    line = [" "] * hours
    for place in range(hours - 1):
        hour = (last - hours + 1 + place) % 24
        if hour % 6 == 0:
            line[place : place + 2] = f"{hour:02d}"
    return "".join(line).rstrip()


def bars(counts: Mapping[str, int], *, most: int = 8) -> list[tuple[str, str, int]]:
    """Return name, bar and count of the largest, the rest summed up."""
    rows = list(counts.items())
    shown, rest = rows[:most], sum(count for _, count in rows[most:])
    if rest:
        shown.append((f"({len(rows) - most} more)", rest))
    largest = max((count for _, count in shown), default=0) or 1
    return [(name, "█" * max(1, count * _BAR // largest), count) for name, count in shown]
