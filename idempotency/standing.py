"""What the ledger knows about a message: a value to decide by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a message has fared with one consumer so far.

    Only *failed* is held against it as an attempt. *crashed* counts starts that ended with
    the death of a process in which nothing else ran: that is proof. *suspected* counts
    those in company: one of several is to blame, and nobody knows which.
    """

    failed: int = 0
    released: int = 0
    crashed: int = 0
    suspected: int = 0
    begun: int = 0
    """Starts by other processes that are neither finished nor, as yet, known to be dead."""
    begun_alone: int = 0
    """Those among them that run on their own: wait until it is known how they end."""
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    last_error: str | None = None
    failing_for: float | None = field(default=None, compare=False)
    """Seconds since the first failure when it was asked, by the database's clock."""

    @property
    def is_suspect(self) -> bool:
        """Whether to run it apart from all that are none."""
        return self.suspected > 0 or self.crashed > 0 or self.begun > 0

    @property
    def is_prime_suspect(self) -> bool:
        """Whether to run it alone, so that a crash has one possible cause.

        Once suspected it had perhaps not even begun; twice, it ran among a few suspects.
        """
        return self.suspected > 1 or self.crashed > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A start whose process died before the end; its blame is in the ledger already."""

    consumer: str
    message_id: str
    owner: str
    alone: bool
    """Whether nothing else ran there: then this message is counted as crashed."""
    innocent: bool = False
    """Whether suspects ran apart there, so that this one had not begun."""


CLEAN = Standing()
"""Nothing is known: the case of nearly every message."""


def judged(owner: str, marks: Sequence[Any]) -> list[Orphan]:
    """Say for each mark of a dead *owner* whether it is proof, suspicion or neither."""
    apart = [mark for mark in marks if mark.alone]
    begun = apart or marks
    return [
        Orphan(
            consumer=mark.consumer,
            message_id=mark.message_id,
            owner=owner,
            alone=len(begun) == 1 and begun[0] is mark,
            innocent=bool(apart) and not mark.alone,
        )
        for mark in marks
    ]


def merged(standing: Standing, row: Any) -> Standing:
    """Add one row of the ledger, attempt or marks, to what is known."""
    if row.begun:
        return replace(standing, begun=int(row.begun), begun_alone=int(row.begun_alone))
    return replace(
        standing,
        failed=row.failed,
        released=row.released,
        crashed=row.crashed,
        suspected=row.suspected,
        first_failed_at=_moment(row.first_failed_at),
        last_failed_at=_moment(row.last_failed_at),
        last_error=row.last_error,
        failing_for=None if row.failing_for is None else max(0.0, float(row.failing_for)),
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
