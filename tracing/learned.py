"""What should have happened, learned from other correlations that began with the same event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from holdfast.db.clock import database_now
from holdfast.tracing.chain import Chain, MissingEvent
from holdfast.tracing.lineage import LineageRecord, beside, records_of
from holdfast.tracing.schema import lineage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

LOOKED_AT = 200
"""Correlations that are learned from: the newest ones before the one that is asked about."""
_ROWS = 10 * LOOKED_AT  # for a correlation has several of its first event: who handled it
_ENOUGH, _NEARLY_ALL = 5, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedEvent:
    """An event that nearly every other correlation has: after which one, and when at the latest."""

    type: str
    after_type: str
    within_seconds: float
    share: float
    """In how many of the others it is, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the other correlations have in common."""

    root_type: str
    looked_at: int
    events: tuple[LearnedEvent, ...]

    def missing(self, chain: Chain, *, now: float) -> list[MissingEvent]:
        """Return what the others have and *chain* has not, the earliest first."""
        there = {event.type for event in chain.events}
        found = [self._missing(chain, one, now) for one in self.events if one.type not in there]
        return sorted(found, key=lambda one: one.due_at or 0.0)

    def _missing(self, chain: Chain, one: LearnedEvent, now: float) -> MissingEvent:
        after = next((event for event in chain.events if event.type == one.after_type), None)
        begun = chain.events[0].time if after is None else after.time
        due = begun + one.within_seconds
        why = f"{one.share:.0%} of {self.looked_at} others that began with {self.root_type} have it"
        if after is not None and after.failures:
            why += "; " + "; ".join(
                f"{after.type} is a dead letter of {bad.service}: {bad.error or 'no reason known'}"
                for bad in after.failures
            )
        return MissingEvent(
            any_of=(one.type,), after=None if after is None else after.id,
            after_type=one.after_type, due_at=due,
            overdue_seconds=now - due if now > due else None, why=why,
        )  # fmt: skip


def learn(databases: Sequence[Engine], chain: Chain) -> Learned:
    """Learn from the newest correlations that began with the same type as *chain*."""
    root = chain.roots[0].type
    others = [_chain(databases, name) for name in _alike(databases, root, chain.correlation_id)]
    others = [one for one in others if one.events and one.roots[0].type == root]
    if len(others) < _ENOUGH:
        return Learned(root_type=root, looked_at=len(others), events=())
    seen: Counter[str] = Counter()
    causes: dict[str, Counter[str]] = {}
    waits: dict[str, list[float]] = {}
    for other in others:
        for type_ in {event.type for event in other.events}:
            event = next(one for one in other.events if one.type == type_)
            cause = next(other.ancestors(event), None)
            if cause is None:
                continue
            seen[type_] += 1
            causes.setdefault(type_, Counter())[cause.type] += 1
            waits.setdefault(type_, []).append(event.time - cause.time)
    return Learned(
        root_type=root,
        looked_at=len(others),
        events=tuple(
            LearnedEvent(
                type=type_, after_type=causes[type_].most_common(1)[0][0],
                # Twice as long as the slowest took: what is later than that is not just slow.
                within_seconds=2 * max(waits[type_]), share=count / len(others),
            )
            for type_, count in seen.items()
            if count >= _NEARLY_ALL * len(others)
        ),
    )  # fmt: skip


def _alike(databases: Sequence[Engine], root: str, but: str) -> list[str]:
    """Return the newest correlations that have an event of type *root*, without *but*."""
    wanted = select(lineage.c.correlation_id).where(
        lineage.c.type == root, lineage.c.correlation_id != but
    )
    found: dict[str, None] = {}
    for engine in databases:
        with engine.connect() as db:
            newest = db.execute(select(func.max(lineage.c.seq))).scalar()
            if newest is not None:
                rows = beside(db, wanted, newest + 1, forward=False, most=_ROWS)
                found |= dict.fromkeys(row.correlation_id for row in rows)
    return [*found][:LOOKED_AT]


def _chain(databases: Sequence[Engine], correlation: str) -> Chain:
    records: list[LineageRecord] = []
    for engine in databases:
        with engine.connect() as db:
            records += records_of(db, correlation)
    return Chain(records)


def now_of(engine: Engine) -> float:
    """Return the time of *engine*'s database."""
    with engine.connect() as db:
        return float(db.execute(select(database_now())).scalar_one())
