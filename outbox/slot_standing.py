"""How a replication slot stands: what it keeps, and how much more it may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStanding:
    """One slot at one moment; sizes are bytes of log."""

    is_lost: bool
    """The slot is missing, or the server has thrown away what it needs."""
    retained: float = 0.0
    """What the slot keeps on the server's disk."""
    unconfirmed: float = 0.0
    """What the relay has not yet finished."""
    safe: float | None = None
    """What can still be written before the slot is lost; None: nothing limits it."""

    @classmethod
    def of(cls, db: Connection, slot: str) -> SlotStanding:
        """Return how *slot* stands now."""
        command = statements("holdfast.outbox.wal", "postgresql")["standing"]
        found = db.execute(command, {"name": slot}).first()
        if found is None or found.wal_status == "lost":
            return cls(is_lost=True)
        return cls(
            is_lost=False,
            retained=float(found.retained or 0),
            unconfirmed=float(found.unconfirmed or 0),
            safe=None if found.safe_wal_size is None else max(0.0, float(found.safe_wal_size)),
        )
