"""`holdfast dlq audit`: who did what and why, and whether the record is whole."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Config, Json, Limit
from holdfast.dlq.audit import entries, verify


def audit(
    *,
    config: Config = None,
    database: Database,
    check: Annotated[
        bool, typer.Option("--verify", help="Check every row against the hash chain.")
    ] = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show who did what and why; --verify checks the hash chain."""
    with dead_letters(database) as engine, engine.connect() as db:
        verdict = verify(db) if check else None
        found = [] if check else entries(db, limit=limit)
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
    rows = [
        (entry.seq, entry.at[:19], entry.actor, entry.action, entry.subject, entry.reason)
        for entry in found
    ]
    print_table(("", "at", "actor", "action", "subject", "reason"), rows)
