"""The events of one correlation as a tree: what came of what, who handled it, what is missing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.db.clock import database_now
from holdfast.db.tables import require_tables
from holdfast.errors import NotFound
from holdfast.tracing.lineage import LineageOutcome, LineageRecord, records_of
from holdfast.tracing.schema import metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.tracing.flow import Expectation, Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What became of an event in one service."""

    service: str
    outcome: LineageOutcome
    at: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEvent:
    """One event, with what every service did with it."""

    id: str
    type: str
    causation_id: str | None
    source: str
    topic: str
    key: str | None
    time: float
    handlings: tuple[Handling, ...]

    @property
    def failures(self) -> tuple[Handling, ...]:
        """Where it is a dead letter, and was not handled since."""
        last = {one.service: one for one in self.handlings}
        dead = LineageOutcome.DEAD_LETTERED
        return tuple(one for one in last.values() if one.outcome is dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingEvent:
    """Something that a flow expects and that nobody has published."""

    any_of: tuple[str, ...]
    after: str | None
    """The id of the event that should have led to it; None for the start of the flow."""
    after_type: str | None
    due_at: float | None
    overdue_seconds: float | None
    """How long it is overdue; None if it may still come in time."""
    why: str
    """What is known of the reason."""

    @property
    def is_overdue(self) -> bool:
        """Whether its time is over."""
        return self.overdue_seconds is not None


class Chain:
    """The events of one correlation, by what caused them."""

    def __init__(self, records: Iterable[LineageRecord]) -> None:
        found = sorted(records, key=lambda one: one.at)
        self.correlation_id = found[0].correlation_id if found else ""
        by_event: dict[str, list[LineageRecord]] = defaultdict(list)
        for one in found:
            by_event[one.event_id].append(one)
        events = [_event(several) for several in by_event.values()]
        self.events = tuple(sorted(events, key=lambda one: (one.time, one.id)))
        """Every event once, the earliest first."""
        self._by_id = {one.id: one for one in self.events}
        self._children: dict[str, list[LineageEvent]] = defaultdict(list)
        for event in self.events:
            if event.causation_id in self._by_id:
                self._children[str(event.causation_id)].append(event)

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self.events[-1].time - self.events[0].time if self.events else 0.0

    @property
    def roots(self) -> tuple[LineageEvent, ...]:
        """The events whose cause is not known here; of a circle, its earliest."""
        roots = [one for one in self.events if one.causation_id not in self._by_id]
        seen = {one.id for root in roots for one in self.descendants(root)}
        seen |= {one.id for one in roots}
        for one in self.events:
            if one.id not in seen:
                roots.append(one)
                seen |= {one.id, *(far.id for far in self.descendants(one))}
        return tuple(roots)

    @property
    def depth(self) -> int:
        """How many events the longest way from a root to a leaf has."""
        deepest = 0
        ahead = [(one, 1) for one in self.roots]
        seen = {one.id for one, _ in ahead}
        while ahead:
            event, depth = ahead.pop()
            deepest = max(deepest, depth)
            fresh = [one for one in self.children(event) if one.id not in seen]
            seen |= {one.id for one in fresh}
            ahead += [(one, depth + 1) for one in fresh]
        return deepest

    def children(self, event: LineageEvent) -> tuple[LineageEvent, ...]:
        """Return what *event* led to directly, the earliest first."""
        return tuple(self._children[event.id])

    def descendants(self, event: LineageEvent) -> Iterator[LineageEvent]:
        """Yield everything that came of *event*, near or far."""
        ahead, seen = [event], {event.id}
        while ahead:
            for one in self._children[ahead.pop().id]:
                if one.id not in seen:
                    seen.add(one.id)
                    ahead.append(one)
                    yield one

    def __getitem__(self, event_id: str) -> LineageEvent:
        """Return the event with this id, or raise `NotFound`."""
        try:
            return self._by_id[event_id]
        except KeyError:
            raise NotFound(f"no event {event_id!r} in {self.correlation_id!r}") from None

    def ancestors(self, event: LineageEvent) -> Iterator[LineageEvent]:
        """Yield what led to *event*, its own cause first and the root cause last."""
        seen = {event.id}
        while (cause := self._by_id.get(str(event.causation_id))) is not None:
            if cause.id in seen:
                return
            seen.add(cause.id)
            yield cause
            event = cause

    def root_cause(self, event: LineageEvent) -> LineageEvent:
        """Return the first event of those that led to *event*; itself, if nothing did."""
        return next(iter([*self.ancestors(event)][::-1]), event)

    def common_ancestor(self, one: LineageEvent, other: LineageEvent) -> LineageEvent | None:
        """Return the nearest event that led to both, or is one of them; None if there is none."""
        above = {event.id for event in (one, *self.ancestors(one))}
        return next((event for event in (other, *self.ancestors(other)) if event.id in above), None)

    def missing(self, flow: Flow, *, now: float) -> list[MissingEvent]:
        """Return what *flow* expects and is not there, what is overdue for longest first."""
        found = [] if self._of((flow.start,)) else [_no_start(flow)]
        found += [
            _missing(event, expected, now)
            for event in self.events
            for expected in flow.after(event.type)
            if not self._has_led(event, expected)
        ]
        return sorted(found, key=lambda one: (one.due_at is not None, one.due_at))

    def _has_led(self, event: LineageEvent, expected: Expectation) -> bool:
        if any(one.type in expected.any_of for one in self.descendants(event)):
            return True
        # Not every producer names the cause; the correlation tells enough then.
        loose = (one for one in self._of(expected.any_of) if one.causation_id not in self._by_id)
        return any(one.id != event.id for one in loose)

    def _of(self, types: Sequence[str]) -> list[LineageEvent]:
        return [one for one in self.events if one.type in types]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A chain, and what a flow misses in it."""

    chain: Chain
    missing: tuple[MissingEvent, ...]
    now: float

    @property
    def is_overdue(self) -> bool:
        """Whether something should have happened by now."""
        return any(one.is_overdue for one in self.missing)


def trace(databases: Sequence[Engine], reference: str, *, flow: Flow | None = None) -> Traced:
    """Return the chain of a correlation id, or of the id of an event in it.

    Services that have databases of their own know different parts of it: name all of them.
    `NotFound` if none knows anything.
    """
    records: list[LineageRecord] = []
    now = 0.0
    for engine in databases:
        with engine.connect() as db:
            require_tables(db, metadata, otherwise=", or call holdfast.tracing.create_tables(…)")
            own = records_of(db, reference)
            now = max(now, db.execute(select(database_now())).scalar_one())
        reference = own[0].correlation_id if own else reference
        records += own
    if not records:
        raise NotFound(
            f"nothing is written about {reference!r}: is it a correlation or event id, and have "
            "the services a Lineage?"
        )
    chain = Chain(records)
    missing = () if flow is None else tuple(chain.missing(flow, now=now))
    return Traced(chain=chain, missing=missing, now=now)


def _event(records: Sequence[LineageRecord]) -> LineageEvent:
    first = next((one for one in records if one.outcome is LineageOutcome.PUBLISHED), records[0])
    return LineageEvent(
        id=first.event_id, type=first.type, causation_id=first.causation_id, source=first.source,
        topic=first.topic, key=first.key, time=first.time,
        handlings=tuple(
            Handling(service=one.service, outcome=one.outcome, at=one.at, error=one.error)
            for one in records
            if one.outcome is not LineageOutcome.PUBLISHED
        ),
    )  # fmt: skip


def _no_start(flow: Flow) -> MissingEvent:
    return MissingEvent(
        any_of=(flow.start,), after=None, after_type=None, due_at=None, overdue_seconds=None,
        why="the flow starts with it, and no service here knows of it",
    )  # fmt: skip


def _missing(event: LineageEvent, expected: Expectation, now: float) -> MissingEvent:
    due = event.time + expected.within_seconds
    return MissingEvent(
        any_of=expected.any_of, after=event.id, after_type=event.type, due_at=due,
        overdue_seconds=now - due if now > due else None, why=_why(event),
    )  # fmt: skip


def _why(event: LineageEvent) -> str:
    if event.failures:
        return "; ".join(
            f"{event.type} is a dead letter of {one.service}: {one.error or 'no reason is known'}"
            for one in event.failures
        )
    if not event.handlings:
        return f"no service has handled {event.type} yet"
    by = ", ".join(dict.fromkeys(one.service for one in event.handlings))
    return f"{event.type} was handled by {by}, and nobody published it"
