"""`holdfast dlq plans` and `verify`: watch and steer replays, and check what was confirmed."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.cli.display import ago, answer, print_json, print_table, say, when
from holdfast.cli.dlq.options import MasterKey, dead_letters, operator
from holdfast.cli.dlq.sending import outlet, resuming, send
from holdfast.cli.exits import EXIT_NOT_FOUND, EXIT_PARTLY, EXIT_UNCONFIRMED
from holdfast.cli.options import Actor, Broker, Config, Database, Json, Limit, Reason
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.plan import ACTIVE, ENDED, NotNow, PlanCounts, PlanState, Rate, ReplayPlan
from holdfast.dlq.replay.plans import Plans

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
    now = SYSTEM_CLOCK.now().timestamp()
    rows = [
        (p.short, f"{p.state}, no sender" if p.id in alone else p.state,
         f"{c.published:,}/{p.total:,}", f"{c[ItemState.CONFIRMED]:,}",
         f"{c[ItemState.FAILED_AGAIN]:,}", ago(p.created_at, now), f"{p.created_by}: {p.reason}")
        for p, c in found
    ]  # fmt: skip
    print_table(("plan", "state", "sent", "confirmed", "failed again", "made", "by"), rows, whole=2)
    first = next((plan for plan, _ in found if plan.state not in ENDED), None)
    if first is not None:
        say(f"next: holdfast dlq plans show {first.short}")


@app.command(epilog="Example: holdfast dlq plans show 9c41")
def show(name: Name, *, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show a plan, what became of its messages, and why some were set aside."""
    with dead_letters(database) as engine:
        plans = Plans(engine)
        plan = plans.find(name)
        counts = plans.tally(plan)
        notes = plans.notes(plan)
        is_alone = _is_alone(plans, plan)
    if as_json:
        print_json({**facts_of(plan, counts), "notes": [asdict(note) for note in notes]})
        return
    say(f"plan {plan.id}  {plan.state}  by {plan.created_by} on {when(plan.created_at)}")
    say(f"  reason: {plan.reason}")
    lanes = f" in {plan.lanes} lanes" if plan.lanes else ""
    say(f"  {plan.total:,} messages{lanes}, sent {counts.published:,}, rate {plan.rate}, "
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
        words = note.note or note.error or (note.again or "")[:12]
        say(f"  {note.dlq_id[:8]} {note.state}: {words}")
    rest = counts.aside + counts[ItemState.FAILED_AGAIN] - _MOST_NOTES
    if rest > 0:
        say(f"  … and {rest:,} more, of which --json tells some")
    if not is_alone:
        _say_next(plan)


def _say_next(plan: ReplayPlan) -> None:
    """Say what can be done about a plan that has not ended."""
    abort = f"holdfast dlq plans abort {plan.short} --reason …"
    if plan.state is PlanState.FREEZING:
        say(f"its messages are being claimed. If who made it is gone:  {abort}")
    elif plan.waits_for_approval:
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
        plan = plans.pause(plans.find(name), operator(actor, reason))
        sent = plans.tally(plan).published
    text = f"plan {plan.short} is paused at {sent:,} of {plan.total:,}"
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
    who = operator(actor, reason)
    with dead_letters(database) as engine:
        plans = Plans(engine)
        speed = None if rate is None else Rate.parse(rate)
        with outlet(engine, broker, master_key_file) as through:
            before = plans.find(name)
            if before.lanes:
                raise NotNow(
                    f"plan {before.short} is divided into {before.lanes} lanes: go on with  "
                    f"{resuming(before)}"
                )
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
        plan = plans.slow(plans.find(name), operator(actor, reason), Rate.parse(speed))
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
        plan = plans.abort(plans.find(name), operator(actor, reason))
        late = plans.on_their_way(plan)
        never = plan.total - plans.tally(plan).published
    text = f"plan {plan.short} is aborted; {never:,} messages were never sent"
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
        who = operator(actor, reason)
        plan = plans.approve(plans.find(name), who, shared_account=shared_account)
    text = f"plan {plan.short} is approved; next: {resuming(plan)}"
    answer(text, _facts(plan), as_json=as_json)


def _is_alone(plans: Plans, plan: ReplayPlan) -> bool:
    """Whether *plan* looks as if it were being sent and nobody sends it."""
    return plan.state in ACTIVE and not plans.is_sent_now(plan)


def _onward(plan: ReplayPlan, counts: PlanCounts) -> str:
    if plan.sent == plan.total and not counts[ItemState.SENT]:
        return f"everything has an outcome, close it with  holdfast dlq verify {plan.short}"
    return f"go on with  {resuming(plan)}"


def _facts(plan: ReplayPlan) -> dict[str, Any]:
    return {**asdict(plan), "rate": plan.rate.per_second}


def facts_of(plan: ReplayPlan, counts: PlanCounts) -> dict[str, Any]:
    """Return what scripts get to know of *plan*."""
    return {**_facts(plan), "items": {state.value: count for state, count in counts.counts.items()}}


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
            plans.overdue(plan, operator(actor, "verify --overdue"))
        plan = plans.ended(plan, operator(actor, "verify: every message has an outcome"))
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
