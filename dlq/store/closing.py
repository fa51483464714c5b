"""Closing dead letters: confirmed, discarded with a reason, or parked; never by silence.

Sibling analysis: many messages of a type failing at once point to a dependency, one to data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import and_, case, func, insert, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import insert_ignoring, listed, looked_up
from holdfast.db.text import cut, plain
from holdfast.dlq.store.rows import CLOSED, CONFIRMED, DISCARDED, PARKED, PENDING, change_row
from holdfast.dlq.store.schema import change, group, head, message
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection


SYSTEM = "holdfast"
"""The actor of what nobody did by hand."""
_CHUNK = 500
_FIXED = "fixed"
_FIGURES = ("dlq_id", "group_id", "key_hash", "tenant", "service_version")


def closed(connection: Connection, dlq_ids: Iterable[str]) -> set[str]:
    """Return which of *dlq_ids* are resolved, so that the rest of their keys may go on.

    Confirmed, discarded, or parked by a person; what a loop cap parked by itself still
    holds its key until a person decides.
    """
    dialect = connection.dialect.name
    resolved: set[str] = set()
    for chunk in _chunks(dlq_ids):
        resolved.update(
            connection.execute(_closed_among(dialect), listed(dialect, chunk)).scalars()
        )
    return resolved


@cache
def _closed_among(dialect: str) -> Any:
    mine = select(message.c.dlq_id, message.c.state, message.c.closed_by)
    found = looked_up(dialect, mine, message.c.dlq_id)
    by_a_person = and_(found.c.state == PARKED, found.c.closed_by != SYSTEM)
    return select(found.c.dlq_id).where(or_(found.c.state.in_((CONFIRMED, DISCARDED)), by_a_person))


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


def fix(
    connection: Connection,
    dlq_ids: Iterable[str],
    *,
    actor: str,
    reason: str,
    clock: Clock = SYSTEM_CLOCK,
) -> list[str]:
    """Close those of *dlq_ids* that are pending as confirmed: a person brought the effect about.

    They are counted apart from what a replay brought about, in the same transaction.
    """
    done = close(connection, dlq_ids, CONFIRMED, actor=actor, reason=reason, clock=clock)
    if done:
        none = {"name": _FIXED, "seq": 0, "hash": ""}
        connection.execute(insert_ignoring(connection, head), none)
        more = {"seq": head.c.seq + len(done)}
        connection.execute(update(head).where(head.c.name == _FIXED).values(**more))
    return done


def fixed_by_hand(connection: Connection) -> int:
    """Return how many letters `fix` has closed so far, those that are pruned since included."""
    found = connection.execute(select(head.c.seq).where(head.c.name == _FIXED)).scalar()
    return 0 if found is None else int(found)


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


MANY = 10
"""Failures of different keys within the window from which on data is an unlikely cause."""
WINDOW = 300.0
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What failed near a problem, and what that says."""

    same: int
    """Messages of the group within the window."""
    keys: int
    """Different keys among them."""
    others: int
    """Messages of the same topic and consumer that failed in other ways."""
    verdict: Literal["dependency", "data", "unclear"]
    why: str


def look_around(
    db: Connection, group_id: str, *, window: float = WINDOW, handled: int | None = None
) -> Around:
    """Judge the group by what failed beside it in the *window* seconds before its last failure.

    Looked at are the messages that the store received up to the newest of the group, 10,000
    at most, so that it takes no longer among a million. *handled* is how many messages of the
    topic succeeded meanwhile, if the caller knows.
    """
    from holdfast.dlq.store.groups import newest

    own = select(group.c.consumer_group, group.c.topic).where(group.c.group_id == group_id)
    who, last = db.execute(own).first(), newest(db, group_id)
    if who is None or last is None:
        return judged(same=0, keys=0, others=0, handled=handled)
    near = (
        select(  # what has no key is on its own
            message.c.group_id,
            func.coalesce(message.c.key_hash, message.c.dlq_id).label("key"),
            message.c.last_failed_at,
        )
        .where(
            message.c.seq.between(last - _MOST, last),
            message.c.consumer_group == who.consumer_group,
            message.c.topic == who.topic,
        )
        .subquery()
    )
    is_own = near.c.group_id == group_id
    until = select(func.max(near.c.last_failed_at)).where(is_own).scalar_subquery()
    row = db.execute(
        select(
            func.sum(case((is_own, 1), else_=0)),
            func.count(func.distinct(case((is_own, near.c.key)))),
            func.sum(case((is_own, 0), else_=1)),
        ).where(near.c.last_failed_at.between(until - window, until))
    ).one()
    return judged(same=int(row[0] or 0), keys=int(row[1]), others=int(row[2] or 0), handled=handled)


def judged(*, same: int, keys: int, others: int, handled: int | None = None) -> Around:
    """Return what the numbers say."""
    failed = same + others
    if keys >= MANY and (handled is None or failed > handled):
        why = f"{same} messages of {keys} keys failed alike at once"
        return _around("dependency", why, same, keys, others)
    if same and keys <= 1 and (others == 0 or (handled or 0) > failed):
        passed = "" if handled is None else f" while {handled} passed"
        return _around("data", f"one key alone failed like this{passed}", same, keys, others)
    why = f"{same} messages of {keys} keys failed alike, {others} in other ways"
    return _around("unclear", why, same, keys, others)


def _around(
    verdict: Literal["dependency", "data", "unclear"], why: str, same: int, keys: int, others: int
) -> Around:
    return Around(same=same, keys=keys, others=others, verdict=verdict, why=why)
