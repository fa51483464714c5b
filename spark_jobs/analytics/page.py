"""The report as one HTML page that opens offline: figures, plots as SVG, no scripts at all.

Everything that comes from a dead letter is escaped, and the page forbids scripts and foreign
content by its own policy. Payloads are not in it, but for the values that make a pattern.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.spark_jobs.analytics.results import (
    HOUR,
    BlastResult,
    PoisonResult,
    Ran,
    TrendsResult,
    TriageResult,
    UsageResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spark_jobs.analytics.results import FieldUsage

Result = TriageResult | TrendsResult | BlastResult | PoisonResult | UsageResult
_MOST_ROWS, _MOST_BARS, _MOST_FIELDS = 25, 10, 200
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 260, 56, 26, 12
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


def page(title: str, *results: Result) -> str:
    """Return one page with all *results*."""
    parts = [f"<h1>{escape(title)}</h1>"]
    if results:
        parts.append(f'<p class="ran">{escape(told(results[0].ran))}</p>')
    for one in results:
        match one:
            case TriageResult():
                parts += _triage(one)
            case TrendsResult():
                parts += _trends(one)
            case BlastResult():
                parts += _blast(one)
            case PoisonResult():
                parts += _poison(one)
            case UsageResult():
                parts += _usage(one)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def told(ran: Ran) -> str:
    """Return which engine ran, why, and over what, in one line."""
    text = f"{ran.records:,} dead letters in {ran.seconds:.1f} s by {ran.engine} ({ran.why})"
    if ran.outliers:
        text += f"; {ran.outliers:,} from hosts with a wrong clock"
    if ran.undated:
        text += f"; {ran.undated:,} of unknown time"
    return text


def when(moment: float | None) -> str:
    """Return *moment* in UTC, to the minute."""
    if moment is None:
        return "–"
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}"


def _triage(found: TriageResult) -> list[str]:
    figures = {"dead letters": found.ran.records, "problems": found.groups_total,
               "look like one cause": len(found.clusters)}  # fmt: skip
    parts = ["<h2>What failed</h2>", _figures(figures)]
    top = found.groups[:_MOST_BARS]
    parts.append(_bars([(f"{one.consumer_group} · {one.title}", one.count) for one in top]))
    parts.append(_table(
        ("group", "~problem", "#count", "first", "last", "#keys ≈", "#tenants ≈", "class"),
        [(_code(one.group_id[:8]), _problem(one.title, one.topic, one.consumer_group),
          f"{one.count:,}", when(one.first), when(one.last), f"{one.keys:,}",
          f"{one.tenants:,}", escape(one.error_class)) for one in found.groups[:_MOST_ROWS]],
    ))  # fmt: skip
    if found.groups_total > _MOST_ROWS:
        parts.append(f"<p>and {found.groups_total - _MOST_ROWS:,} smaller ones</p>")
    if found.clusters:
        parts.append("<h2>Groups that look like one cause</h2>")
        parts.append(_table(
            ("cluster", "~for example", "#groups", "#dead letters"),
            [(_code(one.cluster[:8]), escape(one.title), f"{one.groups:,}", f"{one.count:,}")
             for one in found.clusters[:_MOST_ROWS]],
        ))  # fmt: skip
    return parts


def _trends(found: TrendsResult) -> list[str]:
    names = {one.group_id: one for one in found.named}
    worse = sum(one.verdict == "worse" for one in found.effects)
    figures = {"hours": len(found.hourly), "unusual times": len(found.anomalies),
               "deploys that made it worse": worse}  # fmt: skip
    parts = ["<h2>When it failed</h2>", _figures(figures), _plot(found)]

    def name(group_id: str) -> str:
        known = names.get(group_id)
        return escape(group_id) if known is None else _problem(known.title, known.consumer_group)

    if found.anomalies:
        parts.append(_table(
            ("from (UTC)", "#hours", "#failures", "#usual", "#times", "", "~problem"),
            [(when(one.start), f"{one.hours}", f"{one.observed:,}", f"{one.expected:,.0f}",
              f"{one.ratio:,.1f}×", _badge(one.level), name(one.group_id))
             for one in found.anomalies[:_MOST_ROWS]],
        ))  # fmt: skip
    if found.effects:
        parts.append("<h2>Deploys that changed it</h2>")
        parts.append(_table(
            ("live since", "service", "version", "#a day before", "#a day after", "", "~problem"),
            [(when(one.at), escape(one.consumer_group), escape(one.version),
              f"{one.before:,.0f}", f"{one.after:,.0f}", _badge(one.verdict), name(one.group_id))
             for one in found.effects[:_MOST_ROWS]],
        ))  # fmt: skip
    return parts


def _blast(found: BlastResult) -> list[str]:
    figures: dict[str, int | str] = {"entities hit": found.entities, "tenants hit": found.tenants}
    if found.value is not None:
        figures["value at risk"] = f"{found.value:,.0f}"
    parts = ["<h2>Whom it hits</h2>", _figures(figures)]
    notes = []
    if found.unknown_entities:
        notes.append(f"{found.unknown_entities:,} entities are not in the dimension table")
    if found.without_entity:
        notes.append(f"{found.without_entity:,} dead letters name no entity")
    if notes:
        parts.append(f"<p>{escape('; '.join(notes))}</p>")
    has_value = found.value is not None
    bars = [
        (one.tenant, one.value if has_value else one.entities)
        for one in found.by_tenant[:_MOST_BARS]
    ]
    parts.append(_bars([(name, value or 0) for name, value in bars]))
    parts.append(_table(
        ("group", "~problem", "#dead letters", "#entities", "#tenants", "#value"),
        [(_code(one.group_id[:8]), _problem(one.title, one.consumer_group), f"{one.records:,}",
          f"{one.entities:,}", f"{one.tenants:,}", "–" if one.value is None else
          f"{one.value:,.0f}") for one in found.groups[:_MOST_ROWS]],
    ))  # fmt: skip
    return parts


def _poison(found: PoisonResult) -> list[str]:
    groups = {one.group_id for one in found.patterns}
    figures = {"dead letters": found.ran.records, "healthy payloads": found.healthy,
               "patterns": len(found.patterns), "problems with one": len(groups)}  # fmt: skip
    parts = ["<h2>What sets failed payloads apart</h2>", _figures(figures)]
    if not found.patterns:
        return [*parts, "<p>nothing separates them: look at the code, not at the data</p>"]
    strongest = sorted(found.patterns, key=lambda one: -one.lift)[:_MOST_BARS]
    parts.append(_bars([(f"{one.consumer_group} · {one.told}", one.lift) for one in strongest]))
    parts.append(_table(
        ("group", "~pattern", "#failed", "#healthy", "#times", "#dead letters", "~problem"),
        [(_code(one.group_id[:8]), _code(one.told), f"{one.failed:.0%}", f"{one.healthy:.0%}",
          f"{one.lift:,.1f}×", f"{one.support:,}", _problem(one.title, one.consumer_group))
         for one in found.patterns[:_MOST_ROWS]],
    ))  # fmt: skip
    return [*parts, *_more(len(found.patterns))]


def _usage(found: UsageResult) -> list[str]:
    events = [one for one in found.fields if not one.path]
    unused = [one for one in found.fields if one.unused]
    figures = {"events": found.ran.records, "types and versions": len(events),
               "fields": len(found.fields) - len(events), "may go": len(unused)}  # fmt: skip
    parts = ["<h2>Which types, versions and fields occur</h2>", _figures(figures)]
    often = sorted(events, key=lambda one: -one.count)[:_MOST_BARS]
    parts.append(_bars([(f"{one.type} {one.version}", one.count) for one in often]))
    if unused:
        parts.append(f"<h2>Not seen for {found.unused_days:g} days</h2>")
        parts += _fields(unused)
    parts.append("<h2>All of them</h2>")
    return [*parts, *_fields(found.fields)]


def _fields(fields: Sequence[FieldUsage]) -> list[str]:
    rows = [
        (_code(one.type), escape(one.version or "–"), _code(one.path or "(the event)"),
         escape(one.kind), f"{one.count:,}", f"{one.share:.0%}", when(one.first), when(one.last))
        for one in fields[:_MOST_FIELDS]
    ]  # fmt: skip
    headings = ("type", "version", "field", "kind", "#count", "#share", "first", "last")
    return [_table(headings, rows), *_more(len(fields), _MOST_FIELDS)]


def _more(count: int, shown: int = _MOST_ROWS) -> list[str]:
    return [f"<p>and {count - shown:,} more</p>"] if count > shown else []


def _problem(title: str, *where: str) -> str:
    places = " · ".join(escape(one) for one in where if one)
    return f"{escape(title)}<br><small>{places}</small>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _badge(word: str) -> str:
    return f'<span class="badge b-{escape(word)}">{escape(word)}</span>'


def _figures(figures: dict[str, Any]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value:,}</dd></div>"
        if isinstance(value, int)
        else f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in figures.items()
    )
    return f"<dl>{cells}</dl>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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


def _bars(rows: Sequence[tuple[str, float]]) -> str:
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
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="bars">{"".join(parts)}</svg>'
    )


def _plot(found: TrendsResult) -> str:
    """Return failures by hour with what is usual, the unusual times and the deploys."""
    size = len(found.hourly)
    if not size:
        return "<p>nothing</p>"
    # More points than pixels say no more: the highest of each column is drawn.
    columns = min(size, _WIDTH - _LEFT)
    edges = [place * size // columns for place in range(columns + 1)]
    spans = list(pairwise(edges))
    tops = [max(found.hourly[low:high]) for low, high in spans]
    usual = [max(found.usual[low:high]) for low, high in spans]
    most = max(*tops, *usual, 1)
    inner = _HEIGHT - _BOTTOM - _TOP

    def x(hour: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * hour / size

    def y(count: float) -> float:
        return _TOP + inner * (1 - count / most)

    parts = []
    for odd in found.anomalies:
        start = odd.start / HOUR - found.first_hour
        width = max(2.0, x(start + odd.hours) - x(start))
        parts.append(f'<rect class="{escape(odd.level)}" x="{x(start):.1f}" y="{_TOP}" '
                     f'width="{width:.1f}" height="{inner}"/>')  # fmt: skip
    points = " ".join(
        f"{x((low + high) / 2):.1f},{y(top):.1f}"
        for (low, high), top in zip(spans, tops, strict=True)
    )
    base = y(0)
    parts.append(f'<polygon class="flow" points="{_LEFT},{base} {points} {_WIDTH},{base}"/>')
    line = " ".join(f"{x((low + high) / 2):.1f},{y(value):.1f}"
                    for (low, high), value in zip(spans, usual, strict=True))  # fmt: skip
    parts.append(f'<polyline class="usual" points="{line}"/>')
    for at in sorted({one.at for one in found.effects}):
        place = x(at / HOUR - found.first_hour)
        parts.append(f'<line class="deploy" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" '
                     f'y2="{base}"/>')  # fmt: skip
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{base}" y2="{base}"/>')
    parts += [
        f'<text x="0" y="{y(count) + 4:.1f}">{count:,.0f}</text>' for count in (most / 2, most)
    ]
    for place in range(5):
        hour = place * (size - 1) / 4 if size > 1 else 0
        anchor = ("start", "middle", "middle", "middle", "end")[place]
        moment = when((found.first_hour + int(hour)) * HOUR)[5:]
        parts.append(f'<text x="{x(hour):.1f}" y="{_HEIGHT - 6}" '
                     f'text-anchor="{anchor}">{moment}</text>')  # fmt: skip
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="failures by hour">'
        f"{''.join(parts)}</svg><p><small>filled: failures an hour · dashed: usual · red, amber: "
        "unusual · green: a deploy that changed something</small></p>"
    )
