"""What triage decided about the pending messages of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import func, select

from holdfast.dlq.rows import PENDING
from holdfast.dlq.schema import message

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

MOST = 10_000
"""Messages of a group that are looked at: the latest, so that a million cost no more."""


class Judged(NamedTuple):
    """How many messages have one verdict, and when the next of them is tried by itself."""

    pending: int
    next_retry: float | None


def verdicts(db: Connection, group_id: str) -> dict[str, Judged]:
    """Return the verdicts on the latest pending messages of the group."""
    latest = (
        select(message.c.verdict, message.c.due_at)
        .where(message.c.group_id == group_id, message.c.state == PENDING)
        .order_by(message.c.seq.desc())
        .limit(MOST)
        .subquery()
    )
    query = select(latest.c.verdict, func.count(), func.min(latest.c.due_at))
    rows = db.execute(query.group_by(latest.c.verdict).order_by(latest.c.verdict))
    return {verdict: Judged(count, due) for verdict, count, due in rows}
