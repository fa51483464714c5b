"""`holdfast circuits`: the circuits that consumers share, seen and turned by hand."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.display import answer, print_json, print_table, say
from holdfast.cli.opened import existing_database, operator_of
from holdfast.cli.options import Actor, Config, Database, Json, Reason, seconds
from holdfast.consumer.schema import require_tables
from holdfast.consumer.shared_circuits import CircuitAdmin
from holdfast.db.audit import Operator

app = typer.Typer(
    help="Circuits that consumers share, and turning them by hand.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The dependency, as @circuit names it.")]


@app.command("list", epilog="Example: holdfast circuits list")
def list_(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """List the shared circuits: which are open, and when they are tried again."""
    found = _admin(database).circuits()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        say("no circuit is shared: Consumer(…, share_circuits=True) shares those of its handlers")
        return
    found = sorted(found, key=lambda one: not one.is_open)
    rows = [
        (one.name, "open" if one.is_open else "closed",
         f"{one.seconds:.0f} s" if one.is_open else "")
        for one in found
    ]  # fmt: skip
    print_table(("circuit", "state", "tried again in"), rows)
    first = next((one.name for one in found if one.is_open), None)
    if first is not None:
        say(f"next: once it is back, holdfast circuits close {first} --reason …")


@app.command("open", epilog="Example: holdfast circuits open bank --for 15m --reason 'upkeep'")
def open_(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    length: Annotated[
        str, typer.Option("--for", help="How long, e.g. 30m; then it is tried again.")
    ] = "5m",
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Open a circuit in every process: handlers that need it pause, and nothing is blamed."""
    lasts = seconds(length, "--for")
    _admin(database).open(name, lasts, _operator(actor, reason))
    text = f"{name} is open for {length}: its handlers pause within a second or so"
    answer(text, {"circuit": name, "is_open": True, "seconds": lasts}, as_json=as_json)


@app.command(epilog="Example: holdfast circuits close bank --reason 'the bank is back'")
def close(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Close a circuit in every process; should the dependency still fail, it opens again."""
    _admin(database).close(name, _operator(actor, reason))
    text = f"{name} is closed: its handlers go on within a second or so"
    answer(text, {"circuit": name, "is_open": False}, as_json=as_json)


def _admin(database: str) -> CircuitAdmin:
    engine = existing_database(database)
    with engine.connect() as db:
        require_tables(db)
    return CircuitAdmin(engine)


def _operator(actor: str | None, reason: str) -> Operator:
    return operator_of(actor, reason)
