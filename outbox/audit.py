"""Who did what to parked events, and why; kept in the database, never with payloads."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut, plain, plain_values
from holdfast.errors import ConfigurationError
from holdfast.outbox.schema import audit
from holdfast.transactions import transact

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_LONGEST_SUBJECT = 600
_PRUNED = 1000  # entries in one transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Warrant:
    """The person who acts and the reason; nothing is done to an event without both."""

    actor: str
    reason: str

    def __post_init__(self) -> None:
        if not self.actor.strip():
            raise ConfigurationError("the actor is empty: say who does this, with --actor")
        if not self.reason.strip():
            raise ConfigurationError("the reason is empty: say why this is done, with --reason")


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
    """The audit trail of one outbox; entries are added, and pruned by age alone."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def record(
        self, db: Connection, warrant: Warrant, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        """Write one entry in the transaction of the act itself: both happen or neither."""
        entry = {
            "at": self._clock.now(),
            "actor": cut(warrant.actor),
            "action": action,
            "subject": cut(subject, _LONGEST_SUBJECT),
            "reason": plain(warrant.reason),
            "detail": plain_values(detail),
        }
        db.execute(insert(audit), entry)

    def entries(self, *, limit: int = 100) -> list[Entry]:
        """Return the latest entries, newest first."""
        latest = select(audit).order_by(audit.c.seq.desc()).limit(limit)
        with self._engine.connect() as db:
            rows = db.execute(latest).mappings().all()
        return [Entry(**{**row, "at": in_utc(row["at"])}) for row in rows]

    def prune(self, days: float, warrant: Warrant) -> int:
        """Delete entries older than *days* and return how many; that is an entry itself."""
        if not days >= 1:
            raise ConfigurationError(f"keep {days} days: keep at least 1")
        before = self._clock.now() - timedelta(days=days)

        def act(db: Connection) -> int:
            old = select(audit.c.seq).where(audit.c.at < before).order_by(audit.c.seq)
            seqs = db.execute(old.limit(_PRUNED)).scalars().all()
            if seqs:
                db.execute(delete(audit).where(audit.c.seq.in_(seqs)))
                detail = {"entries": len(seqs), "before": before.isoformat()}
                self.record(db, warrant, "prune", "audit", detail)
            return len(seqs)

        total = 0
        while pruned := transact(self._engine, act, clock=self._clock):
            total += pruned
            if pruned < _PRUNED:
                break
        return total


def in_utc(moment: datetime) -> datetime:
    """Return a stored *moment* in UTC; some databases give it back without its zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
