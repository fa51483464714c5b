"""`holdfast doctor` and `holdfast status`: one examination, as findings with fixes and as a screen.

EXAMPLE is the doctor's; the table of commands has that of status.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.display import break_lines, out, plain, print_json, say
from holdfast.cli.exits import EXIT_DOWN, EXIT_NOT_FOUND
from holdfast.cli.opened import existing_database
from holdfast.cli.options import AnyBroker, Config, Database, Json, seconds
from holdfast.findings import Finding, Severity
from holdfast.outbox.doctor import Limits
from holdfast.status import Examination, LookBounds, SchemaVersion, examine
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

EXAMPLE = "Example: holdfast doctor --database postgresql+psycopg://shop@db/shop || page-someone"

_STYLES = {
    Severity.OK: "green", Severity.UNSEEN: "magenta", Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red", Severity.DOWN: "bold red",
}  # fmt: skip
_MARK, _AREA = 10, 14  # columns


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions:
    """What a look at the whole is given."""

    database: Database
    broker: AnyBroker = None
    within: Annotated[
        str,
        typer.Option(
            envvar="HOLDFAST_WITHIN",
            help="How long the database may take for its first answer, and then all the rest.",
        ),
    ] = "5s"
    slot: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SLOT",
            show_default=False,
            help="The WAL engine's slot; holdfast_outbox_<database> unless set.",
        ),
    ] = None
    publication: Annotated[
        str, typer.Option(envvar="HOLDFAST_PUBLICATION", help="The WAL engine's publication.")
    ] = "holdfast_outbox"
    transaction_age: Annotated[
        str, typer.Option(help="Name transactions that are open for longer, e.g. 5m.")
    ] = "60s"

    def examined(self) -> Examination:
        """Look at everything."""
        longest = seconds(self.transaction_age, "--transaction-age")
        bounds = LookBounds(
            seconds=seconds(self.within, "--within"),
            limits=Limits(transaction_seconds=(longest, max(longest, 3600.0))),
            slot=self.slot,
            publication=self.publication,
        )
        engine = existing_database(self.database)
        try:
            return examine(engine, broker=self.broker, bounds=bounds, versions=_versions)
        finally:
            engine.dispose()


def _versions(engine: Engine) -> Sequence[SchemaVersion]:
    from holdfast.cli.migrations import Migrations  # Alembic is slow to import

    return [
        SchemaVersion(part=branch.name, has=branch.has, newest=branch.newest)
        for branch in Migrations(engine).branches()
    ]


def doctor(*, config: Config = None, wanted: LookOptions, as_json: Json = False) -> None:
    """Name each trouble with its fix; nothing is changed.

    It looks at all that the database is used for: outbox, relays, slots, consumers, held keys,
    circuits, dead letters, replays, sagas; with --broker also at topics and lag. Exit code 0 means
    that nothing is wrong, 1 that something was found or could not be looked at, 3 that the
    database or the broker is down.
    """
    found = wanted.examined()
    if as_json:
        print_json([_facts(finding) for finding in found.findings])
    else:
        _show_findings(found)
    if found.severity is Severity.DOWN:
        raise SystemExit(EXIT_DOWN)
    if found.severity:
        raise SystemExit(EXIT_NOT_FOUND)


def status(*, config: Config = None, wanted: LookOptions, as_json: Json = False) -> None:
    """Show the whole on one screen, the most urgent first; nothing is changed.

    Outbox, relays, slots, consumers, held keys, circuits, dead letters, replays, sagas; with
    --broker also topics and lag. holdfast doctor tells how to mend what is wrong. Exit code 3 means
    that the database or the broker is down.
    """
    found = wanted.examined()
    if as_json:
        print_json(_overview(found, wanted))
    else:
        _show_status(found, wanted)
    if found.severity is Severity.DOWN:
        raise SystemExit(EXIT_DOWN)


def _facts(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "severity": finding.severity.name.lower()}


def _overview(found: Examination, wanted: LookOptions) -> dict[str, Any]:
    """Return the whole as scripts get it."""
    tables = found.tables
    return {
        "database": mask(wanted.database),
        "broker": None if wanted.broker is None else mask(wanted.broker),
        "dialect": None if tables is None else tables.dialect,
        "parts": [] if tables is None else list(tables.parts),
        "severity": found.severity.name.lower(),
        "areas": [
            {
                "area": area.name,
                "severity": area.severity.name.lower(),
                "findings": [_facts(finding) for finding in area.findings],
            }
            for area in found.areas
        ],
        "unseen": [f.check for f in found.findings if f.severity is Severity.UNSEEN],
    }


def _show_status(found: Examination, wanted: LookOptions) -> None:
    where = mask(wanted.database)
    say(where if wanted.broker is None else f"{where} and {mask(wanted.broker)}")
    for area in found.areas:
        bad = [finding for finding in area.findings if finding.severity]
        lines = [finding.text for finding in sorted(bad, key=lambda one: -one.severity)]
        if not bad:
            lines = ["; ".join(finding.text for finding in area.findings)]
        for place, line in enumerate(lines):
            name = "" if place else area.name
            _row(area.severity, f"{name:<{_AREA}}", line, indent=_MARK + _AREA, marked=not place)
    if found.severity:
        say("next: holdfast doctor tells how to mend each")


def _show_findings(found: Examination) -> None:
    bad = [finding for finding in found.findings if finding.severity]
    for finding in sorted(bad, key=lambda one: -one.severity):
        _row(finding.severity, f"{finding.check}: ", finding.text, indent=_MARK)
        if finding.fix is not None:
            for line in break_lines(f"{' ' * _MARK}→ {plain(finding.fix)}", _MARK + 2):
                out.print(Text(line), soft_wrap=True)
    fine = dict.fromkeys(f.check for f in found.findings if not f.severity)
    names = [name for name in fine if name not in {finding.check for finding in bad}]
    if names:
        say(f"{'ok':<{_MARK}}{', '.join(names)}", indent=_MARK)


def _row(severity: Severity, name: str, text: str, *, indent: int, marked: bool = True) -> None:
    """Print one line: how bad, what, and in words, which go on at *indent*."""
    mark = f"{severity.name.lower() if marked else '':<{_MARK}}"
    first, *rest = break_lines(f"{mark}{name}{plain(text)}", indent)
    start = len(mark)
    line = Text.assemble((first[:start], _STYLES[severity]), (first[start : start + len(name)],
                         "bold"), first[start + len(name) :])  # fmt: skip
    out.print(line, soft_wrap=True)
    for more in rest:
        out.print(Text(more), soft_wrap=True)
