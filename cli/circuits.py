"""`holdfast circuits`: the circuits that consumers share, seen and turned by hand."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.audit import Warrant
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.opened import warranted
from holdfast.cli.options import Actor, Config, Database, Json, Reason
from holdfast.consumer.desk import Desk
from holdfast.consumer.tables import require_tables
from holdfast.database import open_database

app = typer.Typer(
    help="Circuits that consumers share, and turning them by hand.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The dependency, as @circuit names it.")]


@app.command("list", epilog="Example: holdfast circuits list")
def list_(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """List the shared circuits: which are open, and when they are tried again."""
    found = _desk(database).circuits()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        say("no circuit is shared: Consumer(…, share_circuits=True) shares those of its handlers")
        return
    rows = [
        (one.name, "open" if one.is_open else "closed",
         f"{one.seconds:.0f} s" if one.is_open else "")
        for one in found
    ]  # fmt: skip
    print_table(("circuit", "state", "tried again in"), rows)


@app.command("open", epilog="Example: holdfast circuits open bank --seconds 900 --reason 'upkeep'")
def open_(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    seconds: Annotated[float, typer.Option(help="For how long; then it is tried again.")] = 300.0,
    actor: Actor = None,
) -> None:
    """Open a circuit in every process: handlers that need it pause, and nothing is blamed."""
    _desk(database).open_circuit(name, seconds, _warrant(actor, reason))
    say(f"{name} is open for {seconds:g} s: its handlers pause within a second or so")


@app.command(epilog="Example: holdfast circuits close bank --reason 'the bank is back'")
def close(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
) -> None:
    """Close a circuit in every process; should the dependency still fail, it opens again."""
    _desk(database).close_circuit(name, _warrant(actor, reason))
    say(f"{name} is closed: its handlers go on within a second or so")


def _desk(database: str) -> Desk:
    engine = open_database(database)
    with engine.connect() as db:
        require_tables(db)
    return Desk(engine)


def _warrant(actor: str | None, reason: str) -> Warrant:
    return warranted(actor, reason)
