"""Who did what to parked events, and why: the outbox's part of the one audit trail."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast import audit as trail
from holdfast.audit import Warrant
from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

AREA = "outbox."
"""How the actions begin in the trail that all share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the audit trail."""

    seq: int
    at: datetime
    actor: str
    action: str
    subject: str
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


class Audit:
    """The audit trail as the outbox writes and reads it."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._trail = trail.Audit(clock=clock)

    def record(
        self, db: Connection, warrant: Warrant, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        """Write one entry in the transaction of the act itself: both happen or neither."""
        self._trail.append(db, warrant, f"{AREA}{action}", subject, detail)

    def entries(self, *, limit: int = 100) -> list[Entry]:
        """Return the latest entries about the outbox, newest first."""
        with self._engine.connect() as db:
            found = trail.entries(db, limit=limit, within=AREA)
        return [
            Entry(
                seq=one.seq,
                at=datetime.fromisoformat(one.at),
                actor=one.actor,
                action=one.action.removeprefix(AREA),
                subject=one.subject,
                reason=one.reason,
                detail=one.detail,
            )
            for one in found
        ]

    def prune(self, days: float, warrant: Warrant) -> int:
        """Delete what is older than *days* from the whole trail; return how many entries."""
        return self._trail.prune(self._engine, days, warrant)


def in_utc(moment: datetime) -> datetime:
    """Return a stored *moment* in UTC; some databases give it back without its zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


__all__ = ["AREA", "Audit", "Entry", "Warrant", "in_utc"]
