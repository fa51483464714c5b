"""The reports of the jobs that move dead letters: archive, plan, replay, stream and transform.

Each is made of what the job knows anyway. No payload, key or subject is on a page.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from holdfast.spark_jobs.html_parts import (
    MOST_BARS,
    MOST_ROWS,
    bars,
    code,
    columns,
    document,
    figures,
    more,
    table,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.dlq.replay.lanes import LaneMark
    from holdfast.dlq.replay.plan import PlanCounts, ReplayPlan
    from holdfast.dlq.topic.stream import StreamCounts
    from holdfast.spark_jobs.archive.state import ArchiveState
    from holdfast.spark_jobs.planning import Planned
    from holdfast.spark_jobs.transforming import Transformed

_MB = 1_000_000


def archive_page(place: str, state: ArchiveState, done: Mapping[str, object] | None = None) -> str:
    """Return what the archive at *place* holds by day, and what a run has *done* to it."""
    days: dict[str, tuple[int, int, int]] = {}
    for file in state.files:
        rows, files, size = days.get(file.day, (0, 0, 0))
        days[file.day] = (rows + file.rows, files + 1, size + file.bytes)
    total = sum(file.bytes for file in state.files)
    parts = [
        "<h1>The archive</h1>",
        _line(f"{place}, last changed by {state.operation} at {when(state.at or None)}"),
        figures({"dead letters": state.rows, "files": len(state.files), "days": len(days),
                 "MB": f"{total / _MB:,.1f}"}),
    ]  # fmt: skip
    if done:
        parts += ["<h2>This run</h2>", figures(done)]
    parts += ["<h2>Dead letters by day</h2>",
              columns([(day, rows) for day, (rows, _, _) in sorted(days.items())])]  # fmt: skip
    last = sorted(days.items(), reverse=True)
    parts.append(table(
        ("day", "#dead letters", "#files", "#MB"),
        [(escape(day), f"{rows:,}", f"{files:,}", f"{size / _MB:,.2f}")
         for day, (rows, files, size) in last[:MOST_ROWS]],
    ))  # fmt: skip
    return document("The archive", [*parts, *more(len(last))])


def plan_page(made: Planned, selected: Mapping[str, object]) -> str:
    """Return what a plan holds: its lanes, and why messages are set aside."""
    name = "A plan that was not written" if made.plan is None else f"Plan {made.plan.short}"
    share = made.largest_lane / made.total if made.total else 0.0
    parts = [
        f"<h1>{escape(name)}</h1>",
        _line(", ".join(f"{key}={value}" for key, value in selected.items())),
        figures({"messages": made.total, "lanes": made.lanes, "canary": made.canary,
                 "in the fullest lane": f"{share:.0%}", "set aside": sum(made.aside.values()),
                 "not pending or claimed elsewhere": made.gone}),
        "<h2>Messages by lane</h2>",
        columns([(f"lane {lane}", size) for lane, size in enumerate(made.by_lane)]),
        "<p><small>a replay takes as long as its fullest lane</small></p>",
    ]  # fmt: skip
    if made.aside:
        parts += ["<h2>Set aside</h2>", bars(_largest(made.aside))]
    return document(name, parts)


def replay_page(
    plan: ReplayPlan, counts: PlanCounts, marks: Sequence[LaneMark], *, ending: str
) -> str:
    """Return how far a plan is: what became of its messages, and where its lanes are."""
    lanes: dict[int, tuple[int, int]] = {}
    for mark in marks:
        start, end = min(mark.start, plan.total), min(mark.beyond, plan.total)
        size, sent = lanes.get(mark.lane, (0, 0))
        lanes[mark.lane] = (size + end - start, sent + max(0, min(mark.sent, end) - start))
    left = sorted(lanes.items(), key=lambda one: (one[1][1] - one[1][0], one[0]))
    parts = [
        f"<h1>Replay of plan {escape(plan.short)}</h1>",
        _line(ending),
        figures({"messages": plan.total, "sent": counts.published, "set aside": counts.aside,
                 "state": plan.state.value}),
        "<h2>What became of them</h2>",
        bars(_largest({state.value: count for state, count in counts.counts.items()})),
        "<h2>Lanes with most to do</h2>",
        table(("lane", "#messages", "#sent", "#left"),
              [(str(lane), f"{size:,}", f"{sent:,}", f"{size - sent:,}")
               for lane, (size, sent) in left[:MOST_ROWS]]),
    ]  # fmt: skip
    return document(f"Replay of plan {plan.short}", [*parts, *more(len(left))])


def stream_page(name: str, total: StreamCounts, batches: Sequence[tuple[int, StreamCounts]]) -> str:
    """Return what a stream stored together, and in its last *batches*."""
    parts = [
        f"<h1>Stream {escape(name)}</h1>",
        figures({"stored": total.stored, "of them unreadable": total.unreadable,
                 "replays confirmed": total.confirmed, "stored before": total.passed}),
        "<h2>Stored by batch</h2>",
        columns([(f"batch {batch}", found.stored) for batch, found in batches]),
    ]  # fmt: skip
    return document(f"Stream {name}", parts)


def transform_page(found: Transformed) -> str:
    """Return what became of the messages of a transform, and why some were refused."""
    counted = {"written": found.written, "refused": found.refused,
               "repeated": found.repeated, "there before": found.known}  # fmt: skip
    verdict = "every message has its place" if found.is_whole else "the counts DIFFER"
    parts = [
        f"<h1>Transform by {escape(found.transform)}</h1>",
        _line("it stopped, for messages were refused" if found.stopped else verdict),
        figures({"read": found.read, "written": found.written, "of them before this run":
                 found.before, "refused": found.refused, "rounds": found.rounds}),
        "<h2>What became of them</h2>",
        bars(_largest(counted)),
    ]  # fmt: skip
    if found.reasons:
        parts += [
            "<h2>Why messages were refused</h2>",
            table(("#refused", "~reason"),
                  [(f"{count:,}", code(reason)) for reason, count in found.reasons.items()]),
            _line(f"they are in {found.aside}"),
        ]  # fmt: skip
    return document(f"Transform by {found.transform}", parts)


def _line(text: str) -> str:
    return f'<p class="ran">{escape(text)}</p>'


def _largest(counts: Mapping[str, int]) -> Sequence[tuple[str, float]]:
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return [(name, count) for name, count in ordered if count][:MOST_BARS]
