"""Who did what to dead letters, and why: the store's part of the one audit trail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import audit as trail
from holdfast.audit import ORIGIN, Entry, Head, Verdict, Warrant, sealed, verify
from holdfast.dlq.transactions import committed

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

OTHERS = ("outbox.", "keys.")
"""How the actions of other packages begin."""


class Audit(trail.Audit):
    """Writes the trail; a database that is away is `DependencyDown`."""

    def record(
        self,
        engine: Engine,
        warrant: Warrant,
        action: str,
        subject: str,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write one entry in a transaction of its own."""
        return committed(
            engine,
            lambda db: self.append(db, warrant, action, subject, detail),
            clock=self._clock,
        )


def entries(
    db: Connection, *, limit: int = 100, subject: str | None = None, actor: str | None = None
) -> list[Entry]:
    """Return the latest entries about dead letters, newest first, whose subject has that part."""
    return trail.entries(db, limit=limit, subject=subject, actor=actor, without=OTHERS)


__all__ = [
    "ORIGIN",
    "OTHERS",
    "Audit",
    "Entry",
    "Head",
    "Verdict",
    "Warrant",
    "entries",
    "sealed",
    "verify",
]
