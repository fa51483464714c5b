"""`holdfast outbox`: what operators see and do."""

from dataclasses import asdict

import typer

from holdfast.cli.display import print_json, print_table
from holdfast.cli.opened import outbox_database
from holdfast.cli.options import Config, Database, Json, Limit
from holdfast.cli.parked import app as parked
from holdfast.outbox.audit import Audit

app = typer.Typer(help="Look into the outbox and handle parked keys.", no_args_is_help=True)
app.add_typer(parked, name="parked")


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
