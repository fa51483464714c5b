"""`holdfast doctor`: what is wrong, and the fix."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from holdfast.brokers import connect
from holdfast.cli.display import out, plain, print_json
from holdfast.cli.failures import sentence
from holdfast.cli.opened import existing_database
from holdfast.cli.options import Config, Database, Json
from holdfast.errors import HoldfastError
from holdfast.outbox.doctor import Doctor, Finding, Limits, Severity
from holdfast.urls import mask

EXAMPLE = "Example: holdfast doctor --database postgresql+psycopg://shop@db/shop || page-someone"

_SETTLED = 7 * 86400.0
_MANY = 10_000  # messages that every group settled so long ago
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}


def doctor(
    *,
    config: Config = None,
    database: Database,
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_BROKER", show_default=False, help="Also see whether it answers."
        ),
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SLOT",
            show_default=False,
            help="The WAL engine's slot; holdfast_outbox_<database> unless set.",
        ),
    ] = None,
    publication: Annotated[
        str, typer.Option(envvar="HOLDFAST_PUBLICATION", help="The WAL engine's publication.")
    ] = "holdfast_outbox",
    transaction_seconds: Annotated[
        float, typer.Option(min=0, help="Name transactions that are open for longer.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Examine the outbox and name each trouble with its fix; nothing is changed.

    Exit code 0 means healthy, 1 that something needs attention soon, 2 that it needs it now.
    """
    engine = existing_database(database)
    limits = Limits(transaction_seconds=(transaction_seconds, max(transaction_seconds, 3600.0)))
    try:
        findings = Doctor(engine, limits=limits, slot=slot, publication=publication).examine()
    finally:
        engine.dispose()
    if broker is not None:
        findings += _asked(broker)
    worst = max(finding.severity for finding in findings)
    if as_json:
        print_json(
            [{**asdict(finding), "severity": finding.severity.name.lower()} for finding in findings]
        )
    else:
        _show(findings)
    raise SystemExit(int(worst))


def _asked(broker: str) -> list[Finding]:
    """See whether the broker answers, and whether its topics grow without bound."""
    try:
        with closing(connect(broker)) as connected, closing(connected.sink()):
            settled = (
                connected.prune(older_than=_SETTLED, most=_MANY, dry_run=True)
                if connected.caps.prune
                else {}
            )
    except HoldfastError as error:
        return [
            Finding(
                check="broker",
                severity=Severity.CRITICAL,
                text=f"{mask(broker)}: {sentence(error)}",
                fix="start it, or correct --broker",
            )
        ]
    answers = Finding(check="broker", severity=Severity.OK, text=f"{mask(broker)} answers")
    return [answers, *(_grown(topic, n) for topic, n in sorted(settled.items()) if n >= _MANY)]


def _grown(topic: str, count: int) -> Finding:
    return Finding(
        check="topic",
        severity=Severity.WARNING,
        text=f"{topic} keeps {count:,} or more messages that every group settled over 7 days ago; "
        "nothing deletes them by itself",
        fix="run  holdfast brokers prune --older-than 7d  regularly, once a day say",
        facts={"topic": topic, "settled": count},
    )


def _show(findings: Iterable[Finding]) -> None:
    for finding in sorted(findings, key=lambda found: -found.severity):
        mark = (f"{finding.severity.name.lower():<9}", _STYLES[finding.severity])
        line = Text.assemble(mark, (f"{finding.check}: ", "bold"), plain(finding.text))
        out.print(line, soft_wrap=True)
        if finding.fix is not None and finding.severity:
            out.print(Text(f"          → {plain(finding.fix)}"), soft_wrap=True)
