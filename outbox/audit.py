"""Who did what to parked events, and why; kept in the database, never with payloads."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError
from holdfast.outbox.schema import audit

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_LONGEST_ACTOR, _LONGEST_SUBJECT = 255, 600


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
    """The audit trail of one outbox; it is only ever added to."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def record(
        self, db: Connection, warrant: Warrant, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        """Write one entry in the transaction of the act itself: both happen or neither."""
        entry = {
            "at": self._clock.now(),
            "actor": warrant.actor[:_LONGEST_ACTOR],
            "action": action,
            "subject": subject[:_LONGEST_SUBJECT],
            "reason": warrant.reason,
            "detail": detail,
        }
        db.execute(insert(audit), entry)

    def entries(self, *, limit: int = 100) -> list[Entry]:
        """Return the latest entries, newest first."""
        latest = select(audit).order_by(audit.c.seq.desc()).limit(limit)
        with self._engine.connect() as db:
            rows = db.execute(latest).mappings().all()
        return [Entry(**{**row, "at": in_utc(row["at"])}) for row in rows]


def in_utc(moment: datetime) -> datetime:
    """Return a stored *moment* in UTC; some databases give it back without its zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
