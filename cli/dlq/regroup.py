"""`holdfast dlq regroup`: failure groups by the algorithm of this version."""

from typing import Annotated

import typer

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.confirming import confirm
from holdfast.cli.dlq.opened import dead_letters, warrant
from holdfast.cli.dlq.options import Database
from holdfast.cli.options import Actor, Config, Json, Reason, Yes
from holdfast.dlq.regrouping import moves
from holdfast.dlq.regrouping import regroup as regrouped


def regroup(
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    only_map: Annotated[
        bool, typer.Option("--map", help="Only show which groups became which, so far.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Group all dead letters anew after an upgrade of the algorithm; the map is kept."""
    with dead_letters(database) as engine:
        if not only_map:
            confirm(1, "Group every dead letter anew", yes=yes)
            regrouped(engine, warrant(actor, reason))
        with engine.connect() as db:
            found = moves(db)
    if as_json:
        print_json([{"from": old, "to": new, "messages": count} for old, new, count in found])
    elif found:
        rows = [(old[:8], new[:8], f"{count:,}") for old, new, count in found]
        print_table(("from", "to", "messages"), rows)
    else:
        say("every dead letter is in the group that this version gives it")
