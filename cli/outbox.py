"""`holdfast outbox`: what operators see and do."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.display import answer, print_json, print_table
from holdfast.cli.opened import outbox_database, warranted
from holdfast.cli.options import Actor, Config, Database, Json, Limit, Reason
from holdfast.cli.parked import app as parked
from holdfast.outbox.audit import Audit

app = typer.Typer(help="Look into the outbox and handle parked keys.", no_args_is_help=True)
app.add_typer(parked, name="parked")


@app.command(epilog="Example: holdfast outbox prune --keep-days 365 --reason 'yearly'")
def prune(
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    keep_days: Annotated[float, typer.Option(help="Keep entries that are younger.")] = 365.0,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Delete old entries of the audit trail, which all of Holdfast shares, from its beginning."""
    with outbox_database(database) as engine:
        count = Audit(engine).prune(keep_days, warranted(actor, reason))
    answer(f"pruned {count:,} entries", {"pruned": count}, as_json=as_json)


@app.command(epilog="Example: holdfast outbox audit --database sqlite:///shop.db --limit 20")
def audit(
    *, config: Config = None, database: Database, limit: Limit = 50, as_json: Json = False
) -> None:
    """Show what operators did to parked events, newest first."""
    with outbox_database(database) as engine:
        entries = Audit(engine).entries(limit=limit)
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (f"{entry.at:%Y-%m-%d %H:%M:%S}Z", entry.actor, entry.action, entry.subject, entry.reason)
        for entry in entries
    ]
    print_table(("at", "actor", "action", "event", "reason"), rows)
