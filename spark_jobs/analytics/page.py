"""What the analytics found, as one HTML page that opens offline.

Payloads are not in it, but for the values that make a pattern.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.results import (
    HOUR,
    BlastResult,
    PoisonResult,
    Ran,
    TrendsResult,
    TriageResult,
    UsageResult,
)
from holdfast.spark_jobs.html_parts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_BARS,
    MOST_ROWS,
    TOP,
    WIDTH,
    badge,
    bars,
    code,
    document,
    figures,
    more,
    table,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spark_jobs.analytics.results import FieldUsage

Result = TriageResult | TrendsResult | BlastResult | PoisonResult | UsageResult
_MOST_FIELDS = 200


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
    return document(title, parts)


def told(ran: Ran) -> str:
    """Return which engine ran, why, and over what, in one line."""
    text = f"{ran.records:,} dead letters in {ran.seconds:.1f} s by {ran.engine} ({ran.why})"
    if ran.outliers:
        text += f"; {ran.outliers:,} from hosts with a wrong clock"
    if ran.undated:
        text += f"; {ran.undated:,} of unknown time"
    return text


def _triage(found: TriageResult) -> list[str]:
    numbers = {"dead letters": found.ran.records, "problems": found.groups_total,
               "look like one cause": len(found.clusters)}  # fmt: skip
    parts = ["<h2>What failed</h2>", figures(numbers)]
    top = found.groups[:MOST_BARS]
    parts.append(bars([(f"{one.consumer_group} · {one.title}", one.count) for one in top]))
    parts.append(table(
        ("group", "~problem", "#count", "first", "last", "#keys ≈", "#tenants ≈", "class"),
        [(code(one.group_id[:8]), _problem(one.title, one.topic, one.consumer_group),
          f"{one.count:,}", when(one.first), when(one.last), f"{one.keys:,}",
          f"{one.tenants:,}", escape(one.error_class)) for one in found.groups[:MOST_ROWS]],
    ))  # fmt: skip
    if found.groups_total > MOST_ROWS:
        parts.append(f"<p>and {found.groups_total - MOST_ROWS:,} smaller ones</p>")
    if found.clusters:
        parts.append("<h2>Groups that look like one cause</h2>")
        parts.append(table(
            ("cluster", "~for example", "#groups", "#dead letters"),
            [(code(one.cluster[:8]), escape(one.title), f"{one.groups:,}", f"{one.count:,}")
             for one in found.clusters[:MOST_ROWS]],
        ))  # fmt: skip
    return parts


def _trends(found: TrendsResult) -> list[str]:
    names = {one.group_id: one for one in found.named}
    worse = sum(one.verdict == "worse" for one in found.effects)
    numbers = {"hours": len(found.hourly), "unusual times": len(found.anomalies),
               "deploys that made it worse": worse}  # fmt: skip
    parts = ["<h2>When it failed</h2>", figures(numbers), _plot(found)]

    def name(group_id: str) -> str:
        known = names.get(group_id)
        return escape(group_id) if known is None else _problem(known.title, known.consumer_group)

    if found.anomalies:
        parts.append(table(
            ("from (UTC)", "#hours", "#failures", "#usual", "#times", "", "~problem"),
            [(when(one.start), f"{one.hours}", f"{one.observed:,}", f"{one.expected:,.0f}",
              f"{one.ratio:,.1f}×", badge(one.level), name(one.group_id))
             for one in found.anomalies[:MOST_ROWS]],
        ))  # fmt: skip
    if found.effects:
        parts.append("<h2>Deploys that changed it</h2>")
        parts.append(table(
            ("live since", "service", "version", "#a day before", "#a day after", "", "~problem"),
            [(when(one.at), escape(one.consumer_group), escape(one.version),
              f"{one.before:,.0f}", f"{one.after:,.0f}", badge(one.verdict), name(one.group_id))
             for one in found.effects[:MOST_ROWS]],
        ))  # fmt: skip
    return parts


def _blast(found: BlastResult) -> list[str]:
    numbers: dict[str, int | str] = {"entities hit": found.entities, "tenants hit": found.tenants}
    if found.value is not None:
        numbers["value at risk"] = f"{found.value:,.0f}"
    parts = ["<h2>Whom it hits</h2>", figures(numbers)]
    notes = []
    if found.unknown_entities:
        notes.append(f"{found.unknown_entities:,} entities are not in the dimension table")
    if found.without_entity:
        notes.append(f"{found.without_entity:,} dead letters name no entity")
    if notes:
        parts.append(f"<p>{escape('; '.join(notes))}</p>")
    has_value = found.value is not None
    tallest = [
        (one.tenant, one.value if has_value else one.entities)
        for one in found.by_tenant[:MOST_BARS]
    ]
    parts.append(bars([(name, value or 0) for name, value in tallest]))
    parts.append(table(
        ("group", "~problem", "#dead letters", "#entities", "#tenants", "#value"),
        [(code(one.group_id[:8]), _problem(one.title, one.consumer_group), f"{one.records:,}",
          f"{one.entities:,}", f"{one.tenants:,}", "–" if one.value is None else
          f"{one.value:,.0f}") for one in found.groups[:MOST_ROWS]],
    ))  # fmt: skip
    return parts


def _poison(found: PoisonResult) -> list[str]:
    groups = {one.group_id for one in found.patterns}
    numbers = {"dead letters": found.ran.records, "healthy payloads": found.healthy,
               "patterns": len(found.patterns), "problems with one": len(groups)}  # fmt: skip
    parts = ["<h2>What sets failed payloads apart</h2>", figures(numbers)]
    if not found.patterns:
        return [*parts, "<p>nothing separates them: look at the code, not at the data</p>"]
    strongest = sorted(found.patterns, key=lambda one: -one.lift)[:MOST_BARS]
    parts.append(bars([(f"{one.consumer_group} · {one.told}", one.lift) for one in strongest]))
    parts.append(table(
        ("group", "~pattern", "#failed", "#healthy", "#times", "#dead letters", "~problem"),
        [(code(one.group_id[:8]), code(one.told), f"{one.failed:.0%}", f"{one.healthy:.0%}",
          f"{one.lift:,.1f}×", f"{one.support:,}", _problem(one.title, one.consumer_group))
         for one in found.patterns[:MOST_ROWS]],
    ))  # fmt: skip
    return [*parts, *more(len(found.patterns))]


def _usage(found: UsageResult) -> list[str]:
    events = [one for one in found.fields if not one.path]
    unused = [one for one in found.fields if one.unused]
    numbers = {"events": found.ran.records, "types and versions": len(events),
               "fields": len(found.fields) - len(events), "may go": len(unused)}  # fmt: skip
    parts = ["<h2>Which types, versions and fields occur</h2>", figures(numbers)]
    often = sorted(events, key=lambda one: -one.count)[:MOST_BARS]
    parts.append(bars([(f"{one.type} {one.version}", one.count) for one in often]))
    if unused:
        parts.append(f"<h2>Not seen for {found.unused_days:g} days</h2>")
        parts += _fields(unused)
    parts.append("<h2>All of them</h2>")
    return [*parts, *_fields(found.fields)]


def _fields(fields: Sequence[FieldUsage]) -> list[str]:
    rows = [
        (code(one.type), escape(one.version or "–"), code(one.path or "(the event)"),
         escape(one.kind), f"{one.count:,}", f"{one.share:.0%}", when(one.first), when(one.last))
        for one in fields[:_MOST_FIELDS]
    ]  # fmt: skip
    headings = ("type", "version", "field", "kind", "#count", "#share", "first", "last")
    return [table(headings, rows), *more(len(fields), _MOST_FIELDS)]


def _problem(title: str, *where: str) -> str:
    places = " · ".join(escape(one) for one in where if one)
    return f"{escape(title)}<br><small>{places}</small>"


def _plot(found: TrendsResult) -> str:
    """Return failures by hour with what is usual, the unusual times and the deploys."""
    size = len(found.hourly)
    if not size:
        return "<p>nothing</p>"
    # More points than pixels say no more: the highest of each column is drawn.
    columns = min(size, WIDTH - LEFT)
    edges = [place * size // columns for place in range(columns + 1)]
    spans = list(pairwise(edges))
    tops = [max(found.hourly[low:high]) for low, high in spans]
    usual = [max(found.usual[low:high]) for low, high in spans]
    most = max(*tops, *usual, 1)
    inner = HEIGHT - BOTTOM - TOP

    def x(hour: float) -> float:
        return LEFT + (WIDTH - LEFT) * hour / size

    def y(count: float) -> float:
        return TOP + inner * (1 - count / most)

    parts = []
    for odd in found.anomalies:
        start = odd.start / HOUR - found.first_hour
        width = max(2.0, x(start + odd.hours) - x(start))
        parts.append(f'<rect class="{escape(odd.level)}" x="{x(start):.1f}" y="{TOP}" '
                     f'width="{width:.1f}" height="{inner}"/>')  # fmt: skip
    points = " ".join(
        f"{x((low + high) / 2):.1f},{y(top):.1f}"
        for (low, high), top in zip(spans, tops, strict=True)
    )
    base = y(0)
    parts.append(f'<polygon class="flow" points="{LEFT},{base} {points} {WIDTH},{base}"/>')
    line = " ".join(f"{x((low + high) / 2):.1f},{y(value):.1f}"
                    for (low, high), value in zip(spans, usual, strict=True))  # fmt: skip
    parts.append(f'<polyline class="usual" points="{line}"/>')
    for at in sorted({one.at for one in found.effects}):
        place = x(at / HOUR - found.first_hour)
        parts.append(f'<line class="deploy" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" '
                     f'y2="{base}"/>')  # fmt: skip
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{base}" y2="{base}"/>')
    parts += [
        f'<text x="0" y="{y(count) + 4:.1f}">{count:,.0f}</text>' for count in (most / 2, most)
    ]
    for place in range(5):
        hour = place * (size - 1) / 4 if size > 1 else 0
        anchor = ("start", "middle", "middle", "middle", "end")[place]
        moment = when((found.first_hour + int(hour)) * HOUR)[5:]
        parts.append(f'<text x="{x(hour):.1f}" y="{HEIGHT - 6}" '
                     f'text-anchor="{anchor}">{moment}</text>')  # fmt: skip
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="failures by hour">'
        f"{''.join(parts)}</svg><p><small>filled: failures an hour · dashed: usual · red, amber: "
        "unusual · green: a deploy that changed something</small></p>"
    )
