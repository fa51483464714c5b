"""`holdfast dlq plans`: watch and steer replays, from any process."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from sqlalchemy import func, select
from sqlalchemy.engine import Engine

from holdfast.cli.display import answer, print_json, print_table, say
from holdfast.cli.dlq.opened import dead_letters, warrant
from holdfast.cli.dlq.options import Database, MasterKey
from holdfast.cli.dlq.sending import outlet, resuming, send
from holdfast.cli.dlq.shown import ago, when
from holdfast.cli.options import Actor, Broker, Config, Json, Limit, Reason
from holdfast.dlq.replay.plan import Plan, Tally
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.rate import Rate
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import ACTIVE, ENDED, ItemState
from holdfast.dlq.schema import group

app = typer.Typer(help="Watch and steer replay plans.", no_args_is_help=True)

_MOST_NOTES = 5
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
        alone = {plan.id for plan, _ in found if _is_alone(plans, plan)}
    if as_json:
        print_json([facts_of(plan, counts) for plan, counts in found])
        return
    if not found:
        say("no plan is open" if is_open else "no plan has been made yet")
        return
    now = datetime.now(UTC).timestamp()
    rows = [
        (p.short, f"{p.state}, no sender" if p.id in alone else p.state, f"{p.sent:,}/{p.total:,}",
         f"{c[ItemState.CONFIRMED]:,}", f"{c[ItemState.FAILED_AGAIN]:,}", ago(p.created_at, now),
         f"{p.created_by}: {p.reason}")
        for p, c in found
    ]  # fmt: skip
    print_table(("plan", "state", "sent", "confirmed", "failed again", "made", "by"), rows, whole=2)


@app.command(epilog="Example: holdfast dlq plans show 9c41")
def show(name: Name, *, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show a plan, what became of its messages, and why some were set aside."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.find(name)
        counts = plans.tally(plan)
        notes = _notes(engine, plan)
        is_alone = _is_alone(plans, plan)
    if as_json:
        print_json({**facts_of(plan, counts), "notes": notes})
        return
    say(f"plan {plan.id}  {plan.state}  by {plan.created_by} on {when(plan.created_at)}")
    say(f"  reason: {plan.reason}")
    say(f"  {plan.total:,} messages, sent {plan.sent:,}, rate {plan.rate}, "
        f"canary {plan.policy.canary}, hash {plan.hash[:12]}")  # fmt: skip
    if plan.stopped_because:
        say(f"  stopped: {plan.stopped_because}")
    if plan.approval:
        say(f"  approval: {plan.approved_by or 'waited for'}")
    if is_alone:
        say(f"  its sender {plan.owner or ''} is gone: {_onward(plan, counts)}")
    elif plan.owner:
        say(f"  sent by {plan.owner}")
    print_table(("state", "messages"), [(s.value, f"{n:,}") for s, n in counts.counts.items()])
    for note in notes[:_MOST_NOTES]:
        words = note["note"] or note["error"] or (note["again"] or "")[:12]
        say(f"  {note['dlq_id'][:8]} {note['state']}: {words}")
    rest = counts.aside + counts[ItemState.FAILED_AGAIN] - _MOST_NOTES
    if rest > 0:
        say(f"  … and {rest:,} more, of which --json tells some")
    if not is_alone:
        _say_next(plan)


def _say_next(plan: Plan) -> None:
    """Say what can be done about a plan that has not ended."""
    abort = f"holdfast dlq plans abort {plan.short} --reason …"
    if plan.waits_for_approval:
        say(f"next: somebody else than {plan.created_by} says  holdfast dlq plans approve "
            f"{plan.short} --reason …")  # fmt: skip
    elif plan.state in ACTIVE:
        say(f"next: holdfast dlq plans pause {plan.short} --reason …, or rate, or abort")
    elif plan.state not in ENDED:
        say(f"next: {resuming(plan)}, or free its messages:  {abort}")


@app.command(epilog="Example: holdfast dlq plans pause 9c41 --reason 'load on the database'")
def pause(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Let the sender end after the batch in hand; resume goes on from there."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.pause(plans.find(name), warrant(actor, reason))
    text = f"plan {plan.short} is paused at {plan.sent:,} of {plan.total:,}"
    answer(text, _facts(plan), as_json=as_json)


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
            before = plans.find(name)
            plan = plans.resume(before, who, rate=speed)
            if plan.forgiven > before.forgiven and not as_json:
                say(f"{plan.forgiven - before.forgiven:,} failures since the last resume are "
                    "forgiven; the next ones count. This plan does not send them again: once it "
                    "is done, make a new one with  holdfast dlq replay")  # fmt: skip
            send(engine, plan, through, who, as_json=as_json)


@app.command(epilog="Example: holdfast dlq plans rate 9c41 50/s --reason 'load on the database'")
def rate(
    name: Name,
    speed: Annotated[str, typer.Argument(metavar="RATE", help="At most, e.g. 500/s or 30/m.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Send a plan slower or faster from now on, also while it is being sent."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.slow(plans.find(name), warrant(actor, reason), Rate.parse(speed))
    answer(f"plan {plan.short} is sent at {plan.rate} at most", _facts(plan), as_json=as_json)


@app.command(epilog="Example: holdfast dlq plans abort 9c41 --reason 'wrong group'")
def abort(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """End a plan; what has no outcome stays pending and is free for another plan.

    Messages that were sent and are on their way are not handled any more, by consumers that use
    this database.
    """
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.abort(plans.find(name), warrant(actor, reason))
        late = plans.on_their_way(plan)
    text = f"plan {plan.short} is aborted; {plan.total - plan.sent:,} messages were never sent"
    if late:
        text += (
            f", {late:,} are on their way: a consumer that uses this database does not handle them "
            "any more, one that does not still may"
        )
    answer(text, {**_facts(plan), "on_their_way": late}, as_json=as_json)


@app.command(epilog="Example: holdfast dlq plans approve 9c41 --reason 'checked the dry run'")
def approve(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    shared_account: Annotated[
        bool,
        typer.Option(
            "--shared-account",
            envvar="HOLDFAST_SHARED_ACCOUNT",
            help="Several people work under one system account: the names alone count. Audited.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Let a large plan go; not by the person who made it, nor from the account it was made with."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        who = warrant(actor, reason)
        plan = plans.approve(plans.find(name), who, shared_account=shared_account)
    text = f"plan {plan.short} is approved; next: holdfast dlq plans resume {plan.short} --reason …"
    answer(text, _facts(plan), as_json=as_json)


def _notes(engine: Engine, plan: Plan) -> list[dict[str, Any]]:
    names = ("dlq_id", "state", "note", "again")
    # What it failed with this time: a group has the words of its kind of failure.
    words = select(func.min(group.c.title)).where(group.c.fingerprint == item.c.again)
    columns = (*(item.c[name] for name in names), words.scalar_subquery().label("error"))
    query = select(*columns).where(
        item.c.plan_id == plan.id,
        item.c.state.in_([s.value for s in (ItemState.FAILED_AGAIN, ItemState.HELD,
                                            ItemState.PARKED, ItemState.SKIPPED)]),
    )  # fmt: skip
    with engine.connect() as db:
        found = db.execute(query.order_by(item.c.position).limit(20)).mappings()
        return [dict(row) for row in found]


def _is_alone(plans: Plans, plan: Plan) -> bool:
    """Whether *plan* looks as if it were being sent and nobody sends it."""
    return plan.state in ACTIVE and not plans.is_sent_now(plan)


def _onward(plan: Plan, counts: Tally) -> str:
    if plan.sent == plan.total and not counts[ItemState.SENT]:
        return f"everything has an outcome, close it with  holdfast dlq verify {plan.short}"
    return f"go on with  {resuming(plan)}"


def _facts(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "rate": plan.rate.per_second}


def facts_of(plan: Plan, counts: Tally) -> dict[str, Any]:
    """Return what scripts get to know of *plan*."""
    return {**_facts(plan), "items": {state.value: count for state, count in counts.counts.items()}}
