"""How much waits in the outbox, and for how long."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, select

from holdfast.outbox.delays import DUE
from holdfast.outbox.schema import delayed, outbox, parked
from holdfast.outbox.slot_standing import SlotStanding
from holdfast.sql import statements
from holdfast.staged import unpacked

if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.engine import Connection, Engine

_COUNTED = 100_000
_UUID7 = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the tables hold at one moment."""

    waiting: int
    """Events not yet published; above 100,000 estimated from the sequence numbers."""
    is_exact: bool
    oldest_seconds: float | None
    """For how long the first event could have left: since its UUIDv7 was made or, if it was
    delayed, since it was due. 0 when none waits, None when its id tells nothing."""
    delayed: int
    overdue_seconds: float
    """How long the first delayed event has been due; 0 when none is."""
    parked: int
    slot: SlotStanding | None = None
    """The WAL engine's replication slot; None with another engine."""


class Backlog:
    """Measures the outbox cheaply, however large it is, and with it the *slot* if one is named."""

    def __init__(self, engine: Engine, *, slot: str | None = None) -> None:
        self._engine = engine
        self._slot = slot
        self._sql = statements("holdfast.outbox", engine.dialect.name)

    def measure(self) -> Standing:
        """Return what the tables hold now."""
        with self._engine.connect() as db:
            now = float(db.execute(self._sql["now"]).scalar_one())
            waiting, is_exact = _waiting(db)
            first = select(outbox.c.id, outbox.c.headers).order_by(outbox.c.seq).limit(1)
            wait = db.execute(self._sql["next_due"]).scalar()
            return Standing(
                waiting=waiting,
                is_exact=is_exact,
                oldest_seconds=_age(db.execute(first).first(), now),
                delayed=_count(db, delayed),
                overdue_seconds=0.0 if wait is None else max(0.0, -float(wait)),
                parked=_count(db, parked),
                slot=None if self._slot is None else SlotStanding.of(db, self._slot),
            )


def _waiting(db: Connection) -> tuple[int, bool]:
    count = _count(db, outbox)
    if count < _COUNTED:
        return count, True
    # Counting millions of rows takes seconds; the ends of the index are there at once.
    ends = select(func.min(outbox.c.seq), func.max(outbox.c.seq))
    lowest, highest = db.execute(ends).one()
    return (count, True) if lowest is None else (max(count, highest - lowest + 1), False)


def _count(db: Connection, table: Table) -> int:
    some = select(table.c.seq).limit(_COUNTED).subquery()
    return db.execute(select(func.count()).select_from(some)).scalar_one()


def _age(first: Any, now: float) -> float | None:
    if first is None:
        return 0.0
    ready = _due(first.headers)
    if ready is None:
        own = first.id if isinstance(first.id, uuid.UUID) else uuid.UUID(str(first.id))
        ready = (own.int >> 80) / 1000 if own.version == _UUID7 else None
    return None if ready is None else max(0.0, now - ready)


def _due(headers: Any) -> float | None:
    """Return when a delayed event was due, if its headers say so."""
    said = dict(unpacked(msgspec.json.encode(headers).decode())).get(DUE)
    try:
        return None if said is None else datetime.fromisoformat(said.decode()).timestamp()
    except ValueError:  # a header of the caller's own
        return None
