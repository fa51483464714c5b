"""`holdfast audit`: who did what and why, to anything, and whether the record is whole."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.display import out, plain, print_json, say
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.late import grouped
from holdfast.cli.opened import existing_database
from holdfast.cli.options import Config, Database, Json, Limit
from holdfast.db.audit import LETTERS, AuditEntry, Head, Verdict, entries, metadata, verify
from holdfast.db.engine import reading
from holdfast.db.tables import require_tables
from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """What to show of the trail, or that it is to be checked."""

    check: Annotated[
        bool, typer.Option("--verify", help="Check every row against the hash chain.")
    ] = False
    head: Annotated[
        str | None,
        typer.Option(
            metavar="SEQ:HASH",
            help="With --verify: a head that was kept elsewhere; the chain must still lead there.",
        ),
    ] = None
    by: Annotated[str | None, typer.Option(help="Only what this one did.")] = None
    subject: Annotated[
        str | None,
        typer.Option(help="Only what names this: a plan, a group or a key, or a part."),
    ] = None
    limit: Limit = 50

    def answered(self, database: str, area: str | None, *, as_json: bool) -> None:
        """Show what is asked for of *area*, or whether the whole trail is as it was written."""
        if self.head is not None and not self.check:
            raise ConfigurationError("--head is for --verify: add it")
        kept = None if self.head is None else Head.parse(self.head)
        engine = existing_database(database)
        try:
            with reading(engine).connect() as db:
                require_tables(db, metadata)
                if self.check:
                    tell(verify(db, kept), as_json=as_json)
                    return
                found = entries(
                    db, limit=self.limit, subject=self.subject, actor=self.by, area=area
                )
        finally:
            engine.dispose()
        show(found, as_json=as_json, filtered=bool(self.by or self.subject))


@grouped
def audit(
    *, config: Config = None, database: Database, wanted: AuditFilter, as_json: Json = False
) -> None:
    """Show who did what and why, to events, keys, circuits and dead letters; newest first."""
    wanted.answered(database, None, as_json=as_json)


@grouped
def letters(
    *, config: Config = None, database: Database, wanted: AuditFilter, as_json: Json = False
) -> None:
    """Show who did what to dead letters and why; --verify checks the hash chain of all audits."""
    wanted.answered(database, LETTERS, as_json=as_json)


def tell(verdict: Verdict, *, as_json: bool) -> None:
    """Say whether the trail is whole, and end with 1 if it is not."""
    if as_json:
        print_json({**asdict(verdict), "is_whole": verdict.is_whole})
    elif verdict.is_whole:
        say(f"the chain of {verdict.checked:,} entries is whole; its head is "
            f"{verdict.seq}:{verdict.head}")  # fmt: skip
    else:
        say(f"THE AUDIT TRAIL WAS CHANGED: {verdict.why}")
    if not verdict.is_whole:
        raise SystemExit(EXIT_NOT_FOUND)


def acts(found: list[AuditEntry]) -> list[dict[str, object]]:
    """Return *found* for a list of one area, without what seals each row."""
    return [
        {name: value for name, value in asdict(entry).items() if name not in ("previous", "hash")}
        for entry in found
    ]


def show(found: list[AuditEntry], *, as_json: bool, filtered: bool) -> None:
    """Print *found*."""
    if as_json:
        print_json([asdict(entry) for entry in found])
        return
    if not found:
        say("no entry matches" if filtered else "nothing was done yet")
        return
    table = Table("", "at", "who and what", "why")
    for column in table.columns[:2]:
        column.no_wrap = True
    for entry in found:
        cells = (
            str(entry.seq),
            f"{entry.at[:10]}\n{entry.at[11:19]}Z",
            f"{entry.actor}: {entry.action}\n{entry.subject}",
            entry.reason,
        )
        table.add_row(*(Text(plain(cell, lines=True), overflow="fold") for cell in cells))
    out.print(table)
