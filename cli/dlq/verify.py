"""`holdfast dlq verify`: the manifest of a plan against what the consumer confirmed."""

from typing import Annotated

import typer

from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.exits import EXIT_PARTLY, EXIT_UNCONFIRMED
from holdfast.cli.dlq.opened import dead_letters, warrant
from holdfast.cli.dlq.options import Database
from holdfast.cli.dlq.plans import Name, facts_of
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Actor, Config, Json
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.state import ItemState


def verify(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    overdue: Annotated[
        bool, typer.Option("--overdue", help="Mark what nobody confirmed as unknown.")
    ] = False,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Check a plan's manifest against what the consumer confirmed."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.find(name)
        is_whole = plans.manifest_hash(plan) == plan.hash
        if overdue:
            plans.overdue(plan, warrant(actor, "verify --overdue"))
        plan = plans.ended(plan, warrant(actor, "verify: every message has an outcome"))
        counts = plans.tally(plan)
    waiting = counts[ItemState.SENT] + counts[ItemState.UNKNOWN] + counts[ItemState.CLAIMED]
    if as_json:
        print_json({**facts_of(plan, counts), "manifest": is_whole, "waiting": waiting})
    else:
        say(f"plan {plan.short}: manifest {'is whole' if is_whole else 'WAS CHANGED'}; "
            f"{counts[ItemState.CONFIRMED]:,} of {plan.total:,} confirmed, "
            f"{counts[ItemState.FAILED_AGAIN]:,} failed again, {counts.aside:,} set aside, "
            f"{waiting:,} without an outcome")  # fmt: skip
        if counts[ItemState.UNKNOWN]:
            say("to send the unknown ones again, abort the plan and make a new one; what the group "
                f"did handle it knows by the id:  holdfast dlq plans abort {plan.short} "
                "--reason …")  # fmt: skip
    if not is_whole:
        raise SystemExit(EXIT_NOT_FOUND)
    if waiting:
        raise SystemExit(EXIT_UNCONFIRMED)
    if counts[ItemState.FAILED_AGAIN]:
        raise SystemExit(EXIT_PARTLY)
