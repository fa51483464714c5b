"""`holdfast audit`: who did what and why, to anything, and whether the record is whole."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from sqlalchemy import inspect

from holdfast.audit import Entry, Head, Verdict, entries, metadata, verify
from holdfast.cli.display import out, plain, print_json, say
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.opened import existing_database
from holdfast.cli.options import Config, Database, Json, Limit
from holdfast.database import reading
from holdfast.errors import ConfigurationError

Check = Annotated[bool, typer.Option("--verify", help="Check every row against the hash chain.")]
KeptHead = Annotated[
    str | None,
    typer.Option(
        "--head", metavar="SEQ:HASH",
        help="With --verify: a head that was kept elsewhere; the chain must still lead there.",
    ),
]  # fmt: skip
OnlyActor = Annotated[str | None, typer.Option("--actor", help="Only what this one did.")]
OnlySubject = Annotated[
    str | None,
    typer.Option("--subject", help="Only what names this: a plan, a group or a key, or a part."),
]


def audit(
    *,
    config: Config = None,
    database: Database,
    check: Check = False,
    head: KeptHead = None,
    actor: OnlyActor = None,
    subject: OnlySubject = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show who did what and why, to events, keys, circuits and dead letters; newest first."""
    engine = existing_database(database)
    try:
        with reading(engine).connect() as db:
            inspector = inspect(db)
            missing = [name for name in sorted(metadata.tables) if not inspector.has_table(name)]
            if missing:
                raise ConfigurationError(
                    f"the database lacks {', '.join(missing)}: run  holdfast db upgrade  with the "
                    "same --database"
                )
            kept = kept_head(head, check=check)
            verdict = verify(db, kept) if check else None
            found = [] if check else entries(db, limit=limit, subject=subject, actor=actor)
    finally:
        engine.dispose()
    if verdict is not None:
        tell(verdict, as_json=as_json)
        return
    show(found, as_json=as_json, filtered=bool(actor or subject))


def kept_head(written: str | None, *, check: bool) -> Head | None:
    """Return the head that was given; it says something only to a check."""
    if written is None:
        return None
    if not check:
        raise ConfigurationError("--head is for --verify: add it")
    return Head.parse(written)


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


def show(found: list[Entry], *, as_json: bool, filtered: bool) -> None:
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
