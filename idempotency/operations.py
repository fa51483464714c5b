"""What operators ask about inboxes and do to them, for commands and programs alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, metadata
from holdfast.db.tables import require_tables
from holdfast.idempotency.renaming import Renamed, rename
from holdfast.idempotency.retention import (
    InboxStats,
    forget,
    prunable,
    prune,
    require_inbox,
    stats,
)
from holdfast.idempotency.schema import roster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator


def groups_of(engine: Engine) -> dict[str, list[str]]:
    """Return the consumer groups that have an inbox here, with the topics or names of handlers."""
    found: dict[str, list[str]] = {}
    with engine.connect() as db:
        for name in db.execute(select(roster.c.name).order_by(roster.c.name)).scalars():
            group, slash, topic = name.partition("/")
            if slash:
                found.setdefault(group, []).append(topic)
    return found


class InboxAdmin:
    """What the consumers of a database remember, seen and changed by hand.

    Whatever lets an effect happen again commits together with its entry in the audit trail.
    """

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        with engine.connect() as db:
            require_inbox(db)
        self._engine = engine
        self._audit = Audit(clock=clock)

    def stats(self) -> InboxStats:
        """Count what each consumer remembers; that reads all of the inbox."""
        return stats(self._engine)

    def prunable(self, *, consumer: str | None = None, most: int = 100_000) -> dict[str, int]:
        """Count what `prune` would delete, of each consumer up to *most*."""
        return prunable(self._engine, consumer=consumer, most=most)

    def prune(self, *, consumer: str | None = None, step: int = 500) -> dict[str, int]:
        """Delete what is older than its consumer's window; return how many rows, by consumer."""
        return prune(self._engine, consumer=consumer, step=step)

    def forget(
        self, consumer: str, ids: Sequence[str], operator: Operator, *, source: str | None = None
    ) -> list[str]:
        """Forget handled messages, so that they may take effect again; return those known."""

        def record(db: Connection, forgotten: list[str]) -> None:
            self._audit.append(db, operator, "inbox.forget", consumer, {"messages": forgotten})

        self._require_trail()
        return forget(self._engine, consumer, ids, source=source, record=record)

    def rename(self, old: str, new: str, operator: Operator) -> Renamed:
        """Give what *old* remembers to *new*, all at once; stop who writes under *old* first."""

        def record(db: Connection, done: Renamed) -> None:
            detail = {"new": new, "remembered": done.remembered, "attempts": done.attempts}
            self._audit.append(db, operator, "inbox.rename", old, detail)

        self._require_trail()
        return rename(self._engine, old, new, record=record)

    def _require_trail(self) -> None:
        with self._engine.connect() as db:
            require_tables(db, metadata)
