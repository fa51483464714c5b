"""What the doctor looks at of inboxes: who runs handlers, what fails, what nobody prunes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import case, func, select

from holdfast.db.clock import database_now
from holdfast.findings import Finding, Look, Severity, counted
from holdfast.idempotency.retention import prunable
from holdfast.idempotency.schema import attempt, owner, roster, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

_MANY = 10_000  # rows beyond their window: consumers prune by themselves, so nobody runs
_SHOWN = 5


def looks(engine: Engine) -> list[Look]:
    """Return what there is to look at; the tables of the inbox must be there."""
    return [Look("consumers", lambda: consumers(engine)), Look("inbox", lambda: inbox(engine))]


def consumers(engine: Engine) -> Iterator[Finding]:
    """Tell which processes run handlers, and what is in flight or fails."""
    with engine.connect() as db:
        alive = case((owner.c.until >= database_now(), 1), else_=0)
        total, living = db.execute(select(func.count(), func.sum(alive)).select_from(owner)).one()
        names = db.execute(select(roster.c.name).order_by(roster.c.name)).scalars().all()
        flying = db.execute(select(func.count()).select_from(start)).scalar_one()
        crashed = case((attempt.c.crashed + attempt.c.suspected > 0, 1), else_=0)
        failing, suspects = db.execute(
            select(func.count(), func.sum(crashed)).select_from(attempt)
        ).one()
    living, suspects = int(living or 0), int(suspects or 0)
    facts = {"alive": living, "dead": total - living, "consumers": list(names),
             "in_flight": flying, "failing": failing, "suspects": suspects}  # fmt: skip
    if not names and not total:
        yield Finding(check="consumers", severity=Severity.OK, text="none has come yet",
                      facts=facts)  # fmt: skip
        return
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    text = counted(living, "process at work", "processes at work")
    text += f" ({shown})" if shown else ""
    yield Finding(
        check="consumers",
        severity=Severity.OK,
        text=f"{text}; {flying:,} in flight, {failing:,} failing",
        facts=facts,
    )
    if suspects:
        yield Finding(
            check="consumers",
            severity=Severity.WARNING,
            text=f"{counted(suspects, 'message was', 'messages were')} in hand when a process "
            "died: the next start runs each alone",
            fix="see why it died in its log (memory, signals); then  holdfast inbox stats",
            facts={"suspects": suspects},
        )


def inbox(engine: Engine) -> Iterator[Finding]:
    """Judge whether what consumers need not remember any more is deleted."""
    found = prunable(engine, most=_MANY)
    many = {name: count for name, count in found.items() if count >= _MANY}
    facts = {"prunable": sum(found.values())}
    if not many:
        yield Finding(check="inbox", severity=Severity.OK, text="pruned in time", facts=facts)
    for name, count in many.items():
        yield Finding(
            check="inbox",
            severity=Severity.WARNING,
            text=f"{name} remembers {count:,} or more messages beyond its window",
            fix=f"run  holdfast inbox prune --consumer {name},  or start the consumer: it prunes",
            facts={"consumer": name, "prunable": count},
        )
