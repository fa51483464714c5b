"""Semantic locks: a saga keeps others from what it is changing, over many transactions.

A lock has a fence, which grows with every holder, and an end, so that nothing stays locked for
ever. The saga's end releases its locks in the same transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError, Transient
from holdfast.ids import require_name
from holdfast.sagas.schema import lock, lock_lease
from holdfast.sagas.wire import current_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session


class ResourceLocked(Transient):
    """Another saga holds the resource; the step is tried again as its retry policy says."""

    def __init__(self, resource: str, holder: str | None) -> None:
        super().__init__(f"{resource!r} is locked by saga {holder}")
        self.resource = resource
        self.holder = holder


def lock_resource(session: Session, resource: str, *, expires: Duration) -> int:
    """Lock *resource* for the saga whose step runs here; return the fence.

    The lock commits with the step, lasts until the saga ends or *expires* has passed, and is
    renewed where this saga holds it already. Hand the fence to whatever is written outside of
    this database: who comes with a lower one than was seen is too late.
    """
    require_name(resource, "lock_resource(resource)")
    seconds = in_seconds(expires, of="expires")
    saga_id = _own_saga()
    db = session.connection()
    db.execute(_insert_unless_there(db, resource))
    this = lock.c.resource == resource
    if lock_lease.renew(db, this, seconds=seconds, owner=saga_id):
        return _fence(db, resource)
    if not lock_lease.take(db, this, seconds=seconds, owner=saga_id):
        held = db.execute(select(lock.c.saga_id).where(this)).scalar()
        raise ResourceLocked(resource, held)
    return _fence(db, resource)


def is_locked(session: Session, resource: str, fence: int) -> bool:
    """Whether this saga still holds *resource* with *fence*; nobody takes it until the commit."""
    db = session.connection()
    this = lock.c.resource == resource
    return lock_lease.verify(db, this, owner=_own_saga(), epoch=fence)


def unlock_resource(session: Session, resource: str) -> None:
    """Release *resource* before the saga ends."""
    lock_lease.release(session.connection(), lock.c.resource == resource, owner=_own_saga())


def release_all(db: Connection, saga_ids: Sequence[str]) -> None:
    """Release what sagas hold, in the transaction in which they end."""
    db.execute(update(lock).where(lock.c.saga_id.in_(saga_ids)).values(lock_lease.released()))


def _own_saga() -> str:
    step = current_step()
    if step is None:
        raise ConfigurationError("a lock is taken by a saga: call this in one of its steps")
    return step.saga_id


def _fence(db: Connection, resource: str) -> int:
    return int(db.execute(select(lock.c.fence).where(lock.c.resource == resource)).scalar_one())


def _insert_unless_there(db: Connection, resource: str) -> Any:
    values = {"resource": resource, "saga_id": None, "until": 0.0, "fence": 0}
    match db.dialect.name:
        case "postgresql":
            return postgresql.insert(lock).values(values).on_conflict_do_nothing()
        case "sqlite":
            return sqlite.insert(lock).values(values).on_conflict_do_nothing()
        case _:
            return insert(lock).values(values).prefix_with("IGNORE")
