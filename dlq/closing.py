"""Closing dead letters: confirmed, discarded with a reason, or parked; never by silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, insert, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut, plain
from holdfast.dlq.changes import change_row
from holdfast.dlq.rows import CLOSED, CONFIRMED, DISCARDED, PARKED, PENDING
from holdfast.dlq.schema import change, message
from holdfast.errors import ConfigurationError
from holdfast.sql import looked_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

SYSTEM = "holdfast"
"""The actor of what nobody did by hand."""
_CHUNK = 500
_FIGURES = ("dlq_id", "group_id", "key_hash", "tenant", "service_version")


def closed(connection: Connection, dlq_ids: Iterable[str]) -> set[str]:
    """Return which of *dlq_ids* are resolved, so that the rest of their keys may go on.

    Confirmed, discarded, or parked by a person; what a loop cap parked by itself still
    holds its key until a person decides.
    """
    mine = select(message.c.dlq_id, message.c.state, message.c.closed_by)
    resolved: set[str] = set()
    for chunk in _chunks(dlq_ids):
        found = looked_up(connection, mine, message.c.dlq_id, chunk)
        by_a_person = and_(found.c.state == PARKED, found.c.closed_by != SYSTEM)
        query = select(found.c.dlq_id).where(
            or_(found.c.state.in_((CONFIRMED, DISCARDED)), by_a_person)
        )
        resolved.update(connection.execute(query).scalars())
    return resolved


def close(
    connection: Connection,
    dlq_ids: Iterable[str],
    state: str,
    *,
    actor: str,
    reason: str,
    clock: Clock = SYSTEM_CLOCK,
) -> list[str]:
    """Close those of *dlq_ids* that are pending as *state*; return them.

    Runs in the caller's transaction, which also holds the audit entry. Ids are locked in
    order, so that two who close at once never deadlock.
    """
    if state not in CLOSED:
        raise ConfigurationError(f"state {state!r}: use one of {', '.join(CLOSED)}")
    if not actor.strip() or not reason.strip():
        raise ConfigurationError("closing needs an actor and a reason: say who and why")
    now = clock.now().timestamp()
    values = {
        "state": state,
        "closed_at": now,
        "closed_by": cut(actor),
        "closed_reason": plain(reason),
        "due_at": None,
    }
    return _moved(connection, dlq_ids, [PENDING], values, state, now)


def reopen(
    connection: Connection, dlq_ids: Iterable[str], *, clock: Clock = SYSTEM_CLOCK
) -> list[str]:
    """Make those of *dlq_ids* that are parked or discarded pending again; return them.

    A person decided, so each has all its replays again. What was confirmed has been handled.
    """
    now = clock.now().timestamp()
    values: dict[str, Any] = {"state": PENDING, "stored_at": now, "replay_count": 0}
    values |= dict.fromkeys(("closed_at", "closed_by", "closed_reason"))
    return _moved(connection, dlq_ids, [PARKED, DISCARDED], values, "reopened", now)


def _moved(
    db: Connection,
    dlq_ids: Iterable[str],
    states: Sequence[str],
    values: dict[str, Any],
    kind: str,
    now: float,
) -> list[str]:
    moved: list[str] = []
    for chunk in _chunks(sorted(set(dlq_ids))):
        query = (
            select(message.c.state, *(message.c[name] for name in _FIGURES))
            .where(message.c.dlq_id.in_(chunk))  # alone: a fresh table would be read by its states
            .order_by(message.c.dlq_id)
            .with_for_update()
        )
        rows = [row for row in db.execute(query).mappings() if row["state"] in states]
        if rows:
            ids = [row["dlq_id"] for row in rows]
            db.execute(update(message).where(message.c.dlq_id.in_(ids)).values(**values))
            db.execute(insert(change), [change_row(row, kind, now) for row in rows])
            moved += ids
    return moved


def _chunks(ids: Iterable[str]) -> Iterable[list[str]]:
    every = list(ids)
    return (every[start : start + _CHUNK] for start in range(0, len(every), _CHUNK))
