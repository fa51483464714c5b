"""What the doctor looks at among dead letters: problems nobody looks after, retries, replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.plan import ACTIVE, PlanState
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.store.schema import message
from holdfast.dlq.store.stats import MOST_COUNTED, stats
from holdfast.findings import Finding, Look, Severity, counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.plan import PlanCounts, ReplayPlan

_LATE = 300.0  # seconds: who sends what is due comes by once a minute or so
_OLD = 86400.0  # seconds for which a problem may go without anybody looking after it
_PLANS = 20


def looks(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> list[Look]:
    """Return what there is to look at; the tables of dead letters must be there."""
    return [
        Look("dead letters", lambda: dead_letters(engine, clock=clock)),
        Look("retries", lambda: retries(engine, clock=clock)),
        Look("replays", lambda: replays(engine, clock=clock)),
    ]


def dead_letters(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Iterator[Finding]:
    """Judge what is pending and whether somebody looks after it, and what waits for a person."""
    found = stats(engine, clock=clock)
    alone = found.groups_by_state["new"] + found.groups_by_state["regressed"]
    age = found.oldest_seconds or 0.0
    facts = {
        "pending": found.pending, "oldest_seconds": found.oldest_seconds, "new_problems": alone,
        "problems": found.groups_by_state, "parked": found.parked,
    }  # fmt: skip
    if not found.pending:
        yield Finding(check="dead letters", severity=Severity.OK, text="none is pending",
                      facts=facts)  # fmt: skip
    else:
        text = f"{found.pending:,} pending, the oldest for {duration(age)}"
        severity, fix = Severity.OK, None
        if alone:
            text += f"; {counted(alone, 'problem', 'problems')} that nobody looks after"
            severity = Severity.of(age, 0.0, _OLD)
            fix = "run  holdfast dlq groups,  then show, simulate and replay each"
        else:
            text += "; somebody looks after each problem"
        yield Finding(check="dead letters", severity=severity, text=text, fix=fix, facts=facts)
    if found.parked:
        many = f"{found.parked:,}{' or more' if found.parked >= MOST_COUNTED else ''}"
        yield Finding(
            check="dead letters",
            severity=Severity.WARNING,
            text=f"{many} parked: a person decides about them",
            fix="run  holdfast dlq list --state parked,  then reopen or discard them",
            facts={"parked": found.parked},
        )


def retries(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Iterator[Finding]:
    """Judge whether letters that were put down for a retry are sent when they are due."""
    late = clock.now().timestamp() - _LATE
    overdue = select(message.c.due_at).where(message.c.due_at < late)
    some = overdue.order_by(message.c.due_at).limit(MOST_COUNTED).subquery()
    with engine.connect() as db:
        number, first = db.execute(select(func.count(), func.min(some.c.due_at))).one()
    facts = {"overdue": number}
    if not number:
        yield Finding(
            check="retries", severity=Severity.OK, text="no retry is overdue", facts=facts
        )
        return
    ago = duration(late + _LATE - first)
    yield Finding(
        check="retries",
        severity=Severity.WARNING,
        text=f"{counted(number, 'dead letter', 'dead letters')} due for a retry, the first "
        f"since {ago}: nobody sends them",
        fix="keep this running:  holdfast dlq replay --due --every 1m --reason 'automatic retry'",
        facts=facts,
    )


def replays(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Iterator[Finding]:
    """Name the plans that have not ended, what they wait for, and what nobody confirmed."""
    plans = Plans(engine, clock=clock)
    found = plans.latest(limit=_PLANS, active=True)
    if not found:
        yield Finding(check="replays", severity=Severity.OK, text="no plan is open",
                      facts={"open": 0})  # fmt: skip
    for plan in found:
        yield _judged(plan, plans.tally(plan), is_sent=plans.is_sent_now(plan))


def _judged(plan: ReplayPlan, counts: PlanCounts, *, is_sent: bool) -> Finding:
    waiting = counts[ItemState.SENT] + counts[ItemState.UNKNOWN]
    text = f"plan {plan.short} ({plan.state}): {counts.published:,} of {plan.total:,} sent"
    if waiting:
        text += f", {waiting:,} not confirmed"
    severity, fix = Severity.WARNING, None
    if is_sent:
        severity = Severity.OK
        text += f"; {plan.owner or 'a sender'} is at it"
    elif plan.state is PlanState.FREEZING:
        text += "; who was making it is gone"
        fix = f"run  holdfast dlq plans abort {plan.short} --reason …  and make it again"
    elif plan.waits_for_approval:
        text += f"; waits for somebody else than {plan.created_by} to approve it"
        fix = f"run  holdfast dlq plans approve {plan.short} --reason …"
    elif plan.sent == plan.total and not waiting:
        text += "; everything has an outcome"
        fix = f"close it:  holdfast dlq verify {plan.short}"
    elif plan.sent == plan.total:
        text += "; see whether the consumer runs"
        fix = f"run  holdfast dlq verify {plan.short}"
    else:
        if plan.state is PlanState.STOPPED and plan.stopped_because:
            text += f"; stopped: {plan.stopped_because}"
        elif plan.state in ACTIVE:
            text += "; its sender is gone"
        command = "spark replay" if plan.lanes else "dlq plans resume"
        fix = f"run  holdfast {command} {plan.short} --reason …,  or abort"
    facts = {"plan": plan.id, "state": plan.state, "sent": counts.published, "total": plan.total,
             "unconfirmed": waiting, "is_sent": is_sent}  # fmt: skip
    return Finding(check="replays", severity=severity, text=text, fix=fix, facts=facts)
