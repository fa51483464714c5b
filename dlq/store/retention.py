"""Retention: only what is closed expires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, column, delete, func, inspect, or_, select, table

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, Operator
from holdfast.db.transactions import committed
from holdfast.dlq.store.closing import SYSTEM
from holdfast.dlq.store.counters import HOUR, fold
from holdfast.dlq.store.rows import CLOSED, PARKED
from holdfast.dlq.store.schema import hour, message, overtaken, revision
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine

_BATCH = 500
_HOURS_KEPT = 24 * 90
# The consumer's, which may be in this database or not.
_HELD = table("holdfast_held_key", column("dlq_id"))


def prune(
    engine: Engine,
    *,
    older_than: float,
    operator: Operator,
    clock: Clock = SYSTEM_CLOCK,
    observe: Callable[[int], object] = lambda _deleted: None,
) -> int:
    """Delete what was closed more than *older_than* seconds ago; return how many.

    What the loop cap parked waits for a person, and stays. So does a letter that a consumer
    still holds a key for: only the letter can let it go. A message's own `expires_at` makes
    it leave sooner or later than that, but never before it is closed. Each batch is a short
    transaction with its audit entry; *observe* hears how many are gone by then.
    """
    if older_than < 0:
        raise ConfigurationError(f"older than {older_than:g} s: use 0 or more")
    now = clock.now().timestamp()
    fold(engine, clock=clock)
    deleted = 0
    while True:
        gone = committed(
            engine, lambda db: _prune_batch(db, now, older_than, operator, clock), clock=clock
        )
        deleted += gone
        observe(deleted)
        if gone < _BATCH:
            break
    oldest = int(now // HOUR) - _HOURS_KEPT
    committed(engine, lambda db: db.execute(delete(hour).where(hour.c.hour < oldest)), clock=clock)
    return deleted


def prunable(engine: Engine, *, older_than: float, clock: Clock = SYSTEM_CLOCK) -> int:
    """Return how many `prune` would delete now."""
    with engine.connect() as db:
        wanted = _over(db, clock.now().timestamp(), older_than)
        query = select(func.count()).select_from(message).where(*wanted)
        return int(db.execute(query).scalar_one())


def _over(db: Connection, now: float, older_than: float) -> list[Any]:
    over = or_(
        and_(message.c.expires_at.is_(None), message.c.closed_at < now - older_than),
        message.c.expires_at < now,
    )
    decided = or_(message.c.state != PARKED, message.c.closed_by != SYSTEM)
    wanted = [message.c.state.in_(CLOSED), decided, over]
    if inspect(db).has_table(_HELD.name):
        wanted.append(~select(_HELD.c.dlq_id).where(_HELD.c.dlq_id == message.c.dlq_id).exists())
    return wanted


def _prune_batch(
    db: Connection, now: float, older_than: float, operator: Operator, clock: Clock
) -> int:
    # Looked up first and locked by name, so that only what goes is locked.
    old = select(message.c.dlq_id).where(*_over(db, now, older_than)).limit(_BATCH)
    names = sorted(db.execute(old).scalars())
    locked = (
        select(message.c.dlq_id)
        .where(message.c.dlq_id.in_(names), message.c.state.in_(CLOSED))
        .order_by(message.c.dlq_id)
        .with_for_update()
    )
    ids = list(db.execute(locked).scalars()) if names else []
    if ids:
        for beside in (revision, overtaken):
            db.execute(delete(beside).where(beside.c.dlq_id.in_(ids)))
        db.execute(delete(message).where(message.c.dlq_id.in_(ids)))
        detail = {"count": len(ids), "first": ids[0], "last": ids[-1]}
        Audit(clock=clock).append(db, operator, "prune", "closed messages", detail)
    return len(ids)
