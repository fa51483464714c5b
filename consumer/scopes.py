"""The scopes of a group's memory: carried over from earlier versions, and told when they change.

A handler is known by its group and its name there, which is its topic unless the user gave
one. What is kept under another name is not found, and messages take effect again: so whoever
starts hears of a name that has come or gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sqlalchemy import exists, select, update

from holdfast.idempotency.keys import fitted
from holdfast.idempotency.layer import Idempotent
from holdfast.idempotency.leased import Leased
from holdfast.idempotency.schema import attempt, inbox, roster

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection

    from holdfast.consumer.route import Route

log = logging.getLogger("holdfast.consumer")


def scope_of(layer: Idempotent | Leased, consumer: str) -> str:
    """Return whose memory *layer* uses: what its user says, or the handler's own."""
    said = None if layer.subject is None else layer.subject.scope
    return consumer if said is None else said


def scopes_of(route: Route) -> set[str]:
    """Return the scopes in which *route* remembers messages; none without `@idempotent`."""
    return {
        scope_of(layer, route.consumer)
        for layer in route.plan.layers
        if isinstance(layer, Idempotent | Leased)
    }


def known_scopes(db: Connection, group: str) -> set[str]:
    """Return the names under which *group* remembers messages in this database."""
    named = roster.c.name.startswith(f"{group}/", autoescape=True)
    rows = db.execute(select(roster.c.id, roster.c.name).where(named)).all()
    return {row.name for row in rows if _remembers(db, row.id)}


def tell_changes(group: str, routes: Iterable[Route], before: set[str]) -> None:
    """Say which scopes of *group* are new here and which nobody has here, after a start.

    *before* is what the database knew until then.
    """
    mine = list(routes)
    now = {scope for route in mine for scope in scopes_of(route)}
    gone = {scope for scope in before - now if not any(route.formerly.has(scope) for route in mine)}
    fresh = {
        scope
        for route in mine
        for scope in scopes_of(route)
        if scope not in before and not any(route.formerly.has(one) for one in before)
    }
    likely = next(iter(fresh)) if len(fresh) == 1 else f"{group}/NAME"
    for scope in sorted(gone):
        log.warning(
            "group %s remembers messages under %s, and no handler here has that name. If another "
            "program of the group has it, all is well; if its topic or name has changed, what it "
            "has handled is new to its successor and takes effect again, until you run  holdfast "
            "inbox rename %s %s --reason …",
            group, scope, scope, likely,
        )  # fmt: skip
    for scope in sorted(fresh if before else ()):
        log.info("%s is new in group %s and remembers nothing yet", scope, group)


def carry_attempts(db: Connection, routes: Iterable[Route]) -> None:
    """Enter what earlier versions counted of messages under the name that the handler has now."""
    other = attempt.alias()
    for route in routes:
        own = fitted(route.consumer)
        former = [fitted(scope) for scope in route.formerly.scopes if fitted(scope) != own]
        for name in former:
            there = exists().where(
                other.c.consumer == own, other.c.message_id == attempt.c.message_id
            )
            # Read first: MySQL updates no table that it reads in the same statement.
            wanted = select(attempt.c.message_id).where(attempt.c.consumer == name, ~there)
            for message_id in db.execute(wanted).scalars().all():
                mine = (attempt.c.consumer == name) & (attempt.c.message_id == message_id)
                db.execute(update(attempt).where(mine).values(consumer=own))


def _remembers(db: Connection, number: int) -> bool:
    first = select(inbox.c.message).where(inbox.c.consumer == number).limit(1)
    return db.execute(first).first() is not None
