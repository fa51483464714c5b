"""What `holdfast dlq` and `holdfast spark` share about analytics: options, words, pages."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.display import note, plain, print_json, print_table, say, sparkline, when
from holdfast.cli.dlq.options import moment
from holdfast.cli.options import AnyGroup, AnyTopic  # noqa: TC001 - typer reads them
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.analytics.page import page, told
from holdfast.spark_jobs.analytics.results import (
    BlastResult,
    Scope,
    TrendsResult,
    TriageResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spark_jobs.analytics.page import Result

_LAST_HOURS = 72
_TITLE = 90

Deploys = Annotated[
    Path | None,
    typer.Option(
        help='A JSON list of {"consumer_group", "version", "at"}; without it a version counts as '
        "live from its first failure on."
    ),
]
DimensionPlace = Annotated[
    str | None,
    typer.Option("--dimension", help="A table of what entities are worth: Parquet, or .csv."),
]
DimensionKey = Annotated[
    str, typer.Option("--dimension-key", help="Its column with what letters call entity_ref.")
]
DimensionValue = Annotated[
    str, typer.Option("--dimension-value", help="Its column with the value of an entity.")
]
Shown = Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="Print at most so many.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeOptions:
    """Which dead letters are looked at."""

    topic: AnyTopic = None
    group: AnyGroup = None
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None
    state: Annotated[
        str | None, typer.Option(help="Only pending, confirmed, discarded or parked ones.")
    ] = None
    since: Annotated[
        str | None,
        typer.Option(help="Failed since: 2h, 3d, or a moment like 2026-11-16T03:00Z."),
    ] = None
    until: Annotated[str | None, typer.Option(help="Failed before: 2h, 3d, or a moment.")] = None

    def scope(self) -> Scope:
        """Return what is meant."""
        return Scope(
            topic=self.topic, consumer_group=self.group, tenant=self.tenant, state=self.state,
            since=moment(self.since, "--since"), until=moment(self.until, "--until"),
        )  # fmt: skip


def submit(job: str) -> None:
    """Run the *job* of `holdfast spark` with the arguments that spark-submit hands on."""
    from holdfast.cli.app import main

    main(["spark", job, *sys.argv[1:]])


def present(result: Result, *, title: str, report: Path | None, as_json: bool, limit: int) -> None:
    """Print *result* for people or for scripts, and write the page if one is asked for."""
    if report is not None:
        write_page(report, title, result)
    if as_json:
        print_json(asdict(result))
        return
    say(told(result.ran))
    if not result.ran.records:
        say("no dead letters: nothing to look at")
        return
    match result:
        case TriageResult():
            _say_triage(result, limit)
        case TrendsResult():
            _say_trends(result, limit)
        case BlastResult():
            _say_blast(result, limit)


def write_page(report: Path, title: str, *results: Result) -> None:
    """Write the page with *results*."""
    save_page(report, page(title, *results))


def save_page(report: Path, text: str) -> None:
    """Write a page, and say where it is."""
    try:
        report.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--report {report}: {error.strerror or error}") from error
    note(f"the report is in {report}")


def _say_triage(found: TriageResult, limit: int) -> None:
    like = len(found.clusters)
    say(f"{found.groups_total:,} problems; {like:,} sets of them look like one cause each")
    print_table(
        ("group", "count", "last", "problem"),
        [(one.group_id[:8], f"{one.count:,}", when(one.last),
          _problem(one.title, one.consumer_group)) for one in found.groups[:limit]],
    )  # fmt: skip
    for one in found.clusters[:5]:
        say(f"{one.groups:,} groups look like one cause ({one.count:,} dead letters): "
            f"{one.title[:_TITLE]}")  # fmt: skip


def _say_trends(found: TrendsResult, limit: int) -> None:
    names = {one.group_id: one for one in found.named}
    last = found.hourly[-_LAST_HOURS:]
    say(f"the last {len(last)} hours: {sparkline(last)}")
    _say_rows(
        "unusual times", ("from", "hours", "failures", "usual", "level", "problem"),
        [(when(one.start), one.hours, f"{one.observed:,}", f"{one.expected:,.0f}", one.level,
          _problem(*_named(names, one.group_id))) for one in found.anomalies[:limit]],
        "no unusual times",
    )  # fmt: skip
    _say_rows(
        "deploys that changed something", ("live since", "version", "before", "after", "problem"),
        [(when(one.at), one.version, f"{one.before:,.0f} a day", f"{one.after:,.0f} a day",
          _problem(*_named(names, one.group_id))) for one in found.effects[:limit]],
        "no deploy changed how often a problem occurs",
    )  # fmt: skip


def _say_blast(found: BlastResult, limit: int) -> None:
    worth = "" if found.value is None else f", worth {found.value:,.2f}"
    say(f"{found.entities:,} entities of {found.tenants:,} tenants are hit{worth}")
    if found.unknown_entities:
        say(f"{found.unknown_entities:,} of them are not in the dimension table")
    if found.without_entity:
        say(f"{found.without_entity:,} dead letters name no entity")
    print_table(
        ("group", "dead letters", "entities", "tenants", "value", "problem"),
        [(one.group_id[:8], f"{one.records:,}", f"{one.entities:,}", f"{one.tenants:,}",
          "–" if one.value is None else f"{one.value:,.0f}",
          _problem(one.title, one.consumer_group)) for one in found.groups[:limit]],
    )  # fmt: skip


def _say_rows(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], nothing: str
) -> None:
    if rows:
        print_table(headings, rows, title=title)
    else:
        say(nothing)


def _named(names: dict[str, Any], group_id: str) -> tuple[str, str]:
    known = names.get(group_id)
    return (group_id, "") if known is None else (known.title, known.consumer_group)


def _problem(title: str, consumer_group: str) -> str:
    text = plain(title if len(title) <= _TITLE else f"{title[:_TITLE]}…")
    return f"{consumer_group}: {text}" if consumer_group else text
