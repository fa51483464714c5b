"""The parts of a report: one HTML page that opens offline, plots as SVG, no scripts at all.

What a part is given as text is escaped here, whoever wrote it; what it is given as cells of a
table is HTML. The page forbids scripts and foreign content by its own policy.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_ROWS, MOST_BARS = 25, 10
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 260, 56, 26, 12
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#5d6b7a;--line:#d7dee6;--paper:#fff;
--bar:#3b74b9;--usual:#9aa7b5;--odd:#c8372d;--warn:#d98b16;--deploy:#2f8f5b}
@media (prefers-color-scheme:dark){:root{--ink:#e3e9ef;--soft:#9fadbb;--line:#33404d;
--paper:#151c23;--bar:#6aa2e6;--usual:#6b7987;--odd:#ff7a6e;--warn:#f0b252;--deploy:#65c793}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:1000px;padding:24px}
h1{font-size:1.5em;margin:0 0 4px}h2{font-size:1.15em;margin:32px 0 8px}
p.ran{color:var(--soft);margin:0 0 16px}
dl{display:flex;flex-wrap:wrap;gap:8px 32px;margin:0 0 16px}dt{color:var(--soft);font-size:.85em}
dd{margin:0;font-size:1.4em;font-weight:600}
table{border-collapse:collapse;width:100%;font-size:.92em}
th{text-align:left;color:var(--soft);font-weight:500}
td,th{border-bottom:1px solid var(--line);padding:5px 14px 5px 0;vertical-align:top;
white-space:nowrap}
td.p{white-space:normal;overflow-wrap:anywhere;width:45%}svg+table{margin-top:16px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font-size:.92em}svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .name{fill:var(--ink)}
.bar{fill:var(--bar)}.usual{fill:none;stroke:var(--usual);stroke-width:1.5;stroke-dasharray:4 3}
.flow{fill:var(--bar);fill-opacity:.28;stroke:var(--bar);stroke-width:1}
.critical{fill:var(--odd);fill-opacity:.22}.warning{fill:var(--warn);fill-opacity:.22}
.deploy{stroke:var(--deploy);stroke-width:1.5}.axis{stroke:var(--line)}
.badge{border-radius:3px;padding:0 5px;color:#fff;font-size:.85em}
.b-critical,.b-worse{background:#b5302a}.b-warning{background:#a96a08}.b-better{background:#27794c}
"""


def document(title: str, parts: Sequence[str]) -> str:
    """Return one page with *parts*, which are HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def when(moment: float | None) -> str:
    """Return *moment* in UTC, to the minute."""
    if moment is None:
        return "–"
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}"


def more(count: int, shown: int = MOST_ROWS) -> list[str]:
    """Return a line that says how many of *count* are not shown."""
    return [f"<p>and {count - shown:,} more</p>"] if count > shown else []


def code(text: str) -> str:
    """Return *text* as it is written."""
    return f"<code>{escape(text)}</code>"


def badge(word: str) -> str:
    """Return *word* with the colour that it has."""
    return f'<span class="badge b-{escape(word)}">{escape(word)}</span>'


def figures(numbers: Mapping[str, object]) -> str:
    """Return large numbers with their names."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value:,}</dd></div>"
        if isinstance(value, int)
        else f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in numbers.items()
    )
    return f"<dl>{cells}</dl>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells; # marks a column of numbers, ~ one of prose."""
    kinds = {"#": 'class="n"', "~": 'class="p"'}
    marks = [kinds.get(one[:1], "") for one in headings]
    head = "".join(
        f"<th {mark}>{escape(one.lstrip('#~'))}</th>"
        for one, mark in zip(headings, marks, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td {mark}>{cell}</td>" for cell, mark in zip(row, marks, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(rows: Sequence[tuple[str, float]]) -> str:
    """Return horizontal bars, the names above them."""
    if not rows:
        return "<p>nothing</p>"
    most = max(value for _, value in rows) or 1
    step = 34
    parts = []
    for place, (name, value) in enumerate(rows):
        y, width = place * step, max(2.0, 840 * value / most)
        label = name if len(name) <= 110 else f"{name[:109]}…"
        parts.append(
            f'<text class="name" x="0" y="{y + 12}">{escape(label)}</text>'
            f'<rect class="bar" x="0" y="{y + 16}" width="{width:.1f}" height="10" rx="2"/>'
            f'<text x="{width + 8:.1f}" y="{y + 25}">{value:,.0f}</text>'
        )
    height = len(rows) * step
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bars">{"".join(parts)}</svg>'
    )


def columns(rows: Sequence[tuple[str, float]]) -> str:
    """Return upright bars in the order given; the first, middle and last are named below."""
    if not rows:
        return "<p>nothing</p>"
    # More bars than pixels say no more: neighbours are added up.
    shown = min(len(rows), (WIDTH - LEFT) // 2)
    edges = [place * len(rows) // shown for place in range(shown + 1)]
    sums = [sum(value for _, value in rows[low:high]) for low, high in pairwise(edges)]
    most = max(*sums, 1)
    inner, step = HEIGHT - BOTTOM - TOP, (WIDTH - LEFT) / shown
    parts = []
    for place, value in enumerate(sums):
        height = inner * value / most
        parts.append(
            f'<rect class="bar" x="{LEFT + place * step:.1f}" y="{TOP + inner - height:.1f}" '
            f'width="{max(1.0, step * 0.8):.1f}" height="{height:.1f}"/>'
        )
    parts += [
        f'<text x="0" y="{TOP + inner * (1 - part) + 4:.1f}">{most * part:,.0f}</text>'
        for part in (0.5, 1.0)
    ]
    named = ((0, "start"), (len(rows) // 2, "middle"), (len(rows) - 1, "end"))
    for place, anchor in named[: min(len(rows), 3)]:
        x = {"start": LEFT, "middle": (LEFT + WIDTH) / 2, "end": WIDTH}[anchor]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">'
                     f"{escape(rows[place][0][:40])}</text>")  # fmt: skip
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="columns">'
        f"{''.join(parts)}</svg>"
    )
