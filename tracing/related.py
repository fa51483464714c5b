"""The relatives of one event: what led to it, what came of it, and what went well beside it.

For who looks at a failure: the chain tells where it stands, and the successes tell what is
different about it. Everything is bounded, also where a nightly job has a million events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.db.tables import missing_tables, require_tables
from holdfast.db.text import fitted
from holdfast.tracing.chain import Chain, LineageEvent
from holdfast.tracing.lineage import LineageOutcome, LineageRecord, about_event, beside, record_of
from holdfast.tracing.schema import lineage, metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

MOST_RECORDS = 5000
"""Rows of a correlation that are read: of a larger one the first, and the event's own."""
NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    """An event that a service handled."""

    event: LineageEvent
    service: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another event of the same type that the same service handled."""

    event_id: str
    correlation_id: str
    key: str | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """One event among its relatives."""

    event: LineageEvent
    chain: Chain
    is_cut: bool
    """Whether the correlation has more than `MOST_RECORDS` rows, of which only some were read."""
    service: str | None
    """The service of which it is, or was, a dead letter; None if no lineage says so."""
    before: tuple[Neighbour, ...]
    """What that service handled of the same type just before it failed, the nearest first."""
    after: tuple[Neighbour, ...]
    """And just after."""

    @property
    def causes(self) -> tuple[LineageEvent, ...]:
        """What led to it, its own cause first and the root cause last."""
        return tuple(self.chain.ancestors(self.event))

    @property
    def effects(self) -> tuple[LineageEvent, ...]:
        """What came of it, near or far, the earliest first."""
        return tuple(sorted(self.chain.descendants(self.event), key=lambda one: one.time))

    @property
    def successes(self) -> tuple[Success, ...]:
        """What was handled in the same correlation, the event itself included, by time."""
        found = [
            Success(event=event, service=one.service, at=one.at)
            for event in self.chain.events
            for one in event.handlings
            if one.outcome is LineageOutcome.HANDLED
        ]
        return tuple(sorted(found, key=lambda one: one.at))


def related(
    databases: Sequence[Engine], event_id: str, *, correlation_id: str | None, group: str
) -> Related | None:
    """Return the relatives of an event that failed in consumer group *group*.

    The first of *databases* is that of the failed consumer; its service is the one whose dead
    letter the event is, that of the name *group* if there are several. None if no lineage is
    written there about the event: it is off, or older than its retention.
    """
    event_id = fitted(event_id)
    correlation = event_id if correlation_id is None else fitted(correlation_id)
    records: list[LineageRecord] = []
    is_cut = False
    before: tuple[Neighbour, ...] = ()
    after: tuple[Neighbour, ...] = ()
    service: str | None = None
    for place, engine in enumerate(databases):
        with engine.connect() as db:
            if place == 0 and missing_tables(db, metadata):
                return None
            require_tables(db, metadata, otherwise=", or call holdfast.tracing.create_tables(…)")
            own, more = _read(db, event_id, correlation)
            if place == 0:
                if not any(one.event_id == event_id for one in own):
                    return None
                if (failed := _failure(db, event_id, group)) is not None:
                    service = failed.service
                    before = _nearest(db, failed, forward=False)
                    after = _nearest(db, failed, forward=True)
        records += own
        is_cut |= more
    chain = Chain(records)
    return Related(
        event=chain[event_id], chain=chain, is_cut=is_cut, service=service, before=before,
        after=after,
    )  # fmt: skip


def _read(db: Connection, event_id: str, correlation: str) -> tuple[list[LineageRecord], bool]:
    """Return the rows of the correlation, the event's own among them; and whether some are left."""
    wanted = select(lineage).where(lineage.c.correlation_id == correlation)
    rows = db.execute(wanted.order_by(lineage.c.seq).limit(MOST_RECORDS + 1)).all()
    is_cut = len(rows) > MOST_RECORDS
    found = {row.seq: record_of(row) for row in rows[:MOST_RECORDS]}
    if is_cut or not found:
        own = select(lineage).where(about_event(event_id))
        for row in db.execute(own.order_by(lineage.c.seq).limit(MOST_RECORDS)):
            found[row.seq] = record_of(row)
    return [found[seq] for seq in sorted(found)], is_cut


def _failure(db: Connection, event_id: str, group: str) -> _Failed | None:
    """Return where the event became a dead letter the last time, in *group* if that is known."""
    dead = select(lineage.c.seq, lineage.c.type, lineage.c.service).where(
        about_event(event_id),
        lineage.c.outcome == LineageOutcome.DEAD_LETTERED.value,
    )
    rows = db.execute(dead.order_by(lineage.c.seq.desc()).limit(100)).all()
    own = [row for row in rows if row.service == group] or rows
    if not own:
        return None
    return _Failed(seq=own[0].seq, type=own[0].type, service=own[0].service)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    seq: int
    type: str
    service: str


def _nearest(db: Connection, failed: _Failed, *, forward: bool) -> tuple[Neighbour, ...]:
    """Return the nearest events of the type that the service handled, on one side in time."""
    wanted = select(lineage).where(
        lineage.c.type == failed.type, lineage.c.service == failed.service,
        lineage.c.outcome == LineageOutcome.HANDLED.value,
    )  # fmt: skip
    return tuple(
        Neighbour(
            event_id=row.event_id, correlation_id=row.correlation_id, key=row.message_key, at=row.at
        )
        for row in beside(db, wanted, failed.seq, forward=forward, most=NEAREST)
    )
