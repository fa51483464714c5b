"""`holdfast dlq plans` and `verify`: watch and steer replays, from any process."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from sqlalchemy import select
from sqlalchemy.engine import Engine

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.dlq.exits import EXIT_UNCONFIRMED
from holdfast.cli.dlq.opened import dead_letters, warrant
from holdfast.cli.dlq.options import Database, MasterKey
from holdfast.cli.dlq.sending import outlet, send
from holdfast.cli.dlq.shown import when
from holdfast.cli.failures import EXIT_NOT_FOUND
from holdfast.cli.options import Actor, Broker, Config, Json, Limit, Reason
from holdfast.dlq.replay.plan import Plan, Tally
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.rate import Rate
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import ItemState

app = typer.Typer(help="Watch and steer replay plans.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The plan's id, or its first or last characters.")]


@app.command("list", epilog="Example: holdfast dlq plans list --open")
def list_(
    *,
    config: Config = None,
    database: Database,
    is_open: Annotated[
        bool, typer.Option("--open", help="Only those that have not ended.")
    ] = False,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """List the newest plans."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        found = [(plan, plans.tally(plan)) for plan in plans.latest(limit=limit, active=is_open)]
    if as_json:
        print_json([_as_json(plan, counts) for plan, counts in found])
        return
    rows = [
        (p.short, p.state, f"{p.total:,}", f"{p.sent:,}", f"{c[ItemState.CONFIRMED]:,}",
         f"{c[ItemState.FAILED_AGAIN]:,}", p.created_by, when(p.created_at), p.reason)
        for p, c in found
    ]  # fmt: skip
    headings = ("plan", "state", "messages", "sent", "confirmed", "failed again", "by", "made",
                "reason")  # fmt: skip
    print_table(headings, rows)


@app.command(epilog="Example: holdfast dlq plans show 9c41")
def show(name: Name, *, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show a plan, what became of its messages, and why some were set aside."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.find(name)
        counts = plans.tally(plan)
        notes = _notes(engine, plan)
    if as_json:
        print_json({**_as_json(plan, counts), "notes": notes})
        return
    say(f"plan {plan.id}  {plan.state}  by {plan.created_by} on {when(plan.created_at)}")
    say(f"  reason: {plan.reason}")
    say(f"  {plan.total:,} messages, sent {plan.sent:,}, rate {plan.rate}, "
        f"canary {plan.policy.canary}, hash {plan.hash[:12]}")  # fmt: skip
    if plan.stopped_because:
        say(f"  stopped: {plan.stopped_because}")
    if plan.approval:
        say(f"  approval: {plan.approved_by or 'waited for'}")
    if plan.owner:
        say(f"  sent by {plan.owner}")
    print_table(("state", "messages"), [(s.value, f"{n:,}") for s, n in counts.counts.items()])
    for note in notes:
        say(f"  {note['dlq_id'][:8]} {note['state']}: {note['note'] or note['again'] or ''}")


@app.command(epilog="Example: holdfast dlq plans pause 9c41 --reason 'load on the database'")
def pause(
    name: Name, *, config: Config = None, database: Database, reason: Reason, actor: Actor = None
) -> None:
    """Let the sender end after the batch in hand; resume goes on from there."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.pause(plans.find(name), warrant(actor, reason))
    say(f"plan {plan.short} is paused at {plan.sent:,} of {plan.total:,}")


@app.command(epilog="Example: holdfast dlq plans resume 9c41 --reason 'fixed in 1.4.3'")
def resume(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    reason: Reason,
    rate: Annotated[str | None, typer.Option(help="From now on at most, e.g. 500/s.")] = None,
    actor: Actor = None,
    master_key_file: MasterKey = None,
    as_json: Json = False,
) -> None:
    """Send a plan on, also after a crash of its sender; what is confirmed is not sent again."""
    who = warrant(actor, reason)
    with dead_letters(database) as engine:
        plans = Plans(engine)
        speed = None if rate is None else Rate.parse(rate)
        with outlet(engine, broker, master_key_file) as through:
            plan = plans.resume(plans.find(name), who, rate=speed)
            send(engine, plan, through, who, as_json=as_json)


@app.command(epilog="Example: holdfast dlq plans abort 9c41 --reason 'wrong group'")
def abort(
    name: Name, *, config: Config = None, database: Database, reason: Reason, actor: Actor = None
) -> None:
    """End a plan; what was not sent stays pending and is free for another plan."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.abort(plans.find(name), warrant(actor, reason))
    say(f"plan {plan.short} is aborted; {plan.total - plan.sent:,} messages were never sent")


@app.command(epilog="Example: holdfast dlq plans approve 9c41 --reason 'checked the dry run'")
def approve(
    name: Name, *, config: Config = None, database: Database, reason: Reason, actor: Actor = None
) -> None:
    """Let a large plan go; not by the person who made it."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.approve(plans.find(name), warrant(actor, reason))
    say(f"plan {plan.short} is approved; next: holdfast dlq plans resume {plan.short} --reason …")


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
        counts = plans.tally(plan)
    waiting = counts[ItemState.SENT] + counts[ItemState.UNKNOWN] + counts[ItemState.CLAIMED]
    if as_json:
        print_json({**_as_json(plan, counts), "manifest": is_whole, "waiting": waiting})
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


def _notes(engine: Engine, plan: Plan) -> list[dict[str, Any]]:
    names = ("dlq_id", "state", "note", "again")
    query = select(*(item.c[name] for name in names)).where(
        item.c.plan_id == plan.id,
        item.c.state.in_([s.value for s in (ItemState.FAILED_AGAIN, ItemState.HELD,
                                            ItemState.PARKED, ItemState.SKIPPED)]),
    )  # fmt: skip
    with engine.connect() as db:
        found = db.execute(query.order_by(item.c.position).limit(20)).mappings()
        return [dict(row) for row in found]


def _as_json(plan: Plan, counts: Tally) -> dict[str, Any]:
    facts = asdict(plan)
    facts["rate"] = plan.rate.per_second
    return {**facts, "items": {state.value: count for state, count in counts.counts.items()}}
