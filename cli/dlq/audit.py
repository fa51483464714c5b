"""`holdfast dlq audit`: who did what and why, and whether the record is whole."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.display import out, plain, print_json, say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Config, Json, Limit
from holdfast.database import reading
from holdfast.dlq.audit import entries, verify


def audit(
    *,
    config: Config = None,
    database: Database,
    check: Annotated[
        bool, typer.Option("--verify", help="Check every row against the hash chain.")
    ] = False,
    actor: Annotated[str | None, typer.Option(help="Only what this one did.")] = None,
    subject: Annotated[
        str | None, typer.Option(help="Only what names this: a plan or a group, or a part of it.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show who did what and why; --verify checks the hash chain."""
    with dead_letters(database) as engine, reading(engine).connect() as db:
        verdict = verify(db) if check else None
        found = [] if check else entries(db, limit=limit, subject=subject, actor=actor)
    if verdict is not None:
        if as_json:
            print_json({**asdict(verdict), "is_whole": verdict.is_whole})
        elif verdict.is_whole:
            say(f"the chain of {verdict.checked:,} entries is whole; its head is {verdict.head}")
        else:
            say(f"THE AUDIT TRAIL WAS CHANGED: {verdict.why}")
        if not verdict.is_whole:
            raise SystemExit(EXIT_NOT_FOUND)
        return
    if as_json:
        print_json([asdict(entry) for entry in found])
        return
    if not found:
        say("no entry matches" if actor or subject else "nothing was done yet")
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
