"""A chain of events as people and scripts read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast.cli.display import age, rfc3339
from holdfast.tracing import LineageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.tracing import Chain, Handling, LineageEvent, MissingEvent, Traced
    from holdfast.tracing.related import Neighbour, Related, Success

_MINUTE = 60
MOST_RELATIVES = 8
"""Relatives of each kind that are printed; a script gets all of them."""


def traced_lines(found: Traced) -> Iterator[str]:
    """Yield the lines of the tree, then what is missing."""
    chain = found.chain
    count = len(chain.events)
    yield (
        f"{chain.correlation_id}: {count} event{'s' * (count != 1)} in {_length(chain.seconds)}, "
        f"from {rfc3339(chain.events[0].time)}"
    )
    start = chain.events[0].time
    seen: set[str] = set()
    for root in chain.roots:
        yield from _branch(chain, root, start, seen)
    for one in found.missing:
        yield _missing(one)


def traced_facts(found: Traced) -> dict[str, Any]:
    """Return the same for a script."""
    return {
        "correlation_id": found.chain.correlation_id,
        "events": [{**asdict(one), "time": rfc3339(one.time)} for one in found.chain.events],
        "missing": [asdict(one) for one in found.missing],
        "is_overdue": found.is_overdue,
    }


def related_lines(found: Related) -> Iterator[str]:
    """Yield where an event stands in its chain, and what went well beside it."""
    chain, event = found.chain, found.event
    count = len(chain.events)
    first = "the first " if found.is_cut else ""
    yield (
        f"lineage: {first}{count} event{'s' * (count != 1)} of {chain.correlation_id} in "
        f"{_length(chain.seconds)}; all:  holdfast lineage show {chain.correlation_id}"
    )
    causes = [event_line(one) for one in found.causes]
    if causes:
        yield f"  root cause: {causes.pop()}"
    yield from _some("  led to by ", causes)
    yield f"  this one: {event_line(event)}"
    yield from _some("  it led to ", [event_line(one) for one in found.effects])
    told = [_success(found, one) for one in found.successes]
    yield "related successes: " + ("in this correlation" if told else "none in this correlation")
    yield from _some("  ", told)
    if found.service is None:
        return
    around = [_neighbour(one, "before") for one in found.before]
    around += [_neighbour(one, "after") for one in found.after]
    none = "" if around else " none"
    yield f"other {event.type} that {found.service} handled around it:{none}"
    yield from (f"  {one}" for one in around)


def related_facts(found: Related) -> dict[str, Any]:
    """Return the same for a script."""
    return {
        "correlation_id": found.chain.correlation_id,
        "event": _event_facts(found.event),
        "causes": [_event_facts(one) for one in found.causes],
        "effects": [_event_facts(one) for one in found.effects],
        "successes": [
            {"id": one.event.id, "type": one.event.type, "service": one.service, "at": one.at}
            for one in found.successes
        ],
        "service": found.service,
        "before": [asdict(one) for one in found.before],
        "after": [asdict(one) for one in found.after],
        "is_cut": found.is_cut,
    }


def _event_facts(event: LineageEvent) -> dict[str, Any]:
    return {**asdict(event), "time": rfc3339(event.time)}


def _some(lead: str, told: Sequence[str]) -> Iterator[str]:
    yield from (f"{lead}{one}" for one in told[:MOST_RELATIVES])
    if len(told) > MOST_RELATIVES:
        yield f"{lead}{len(told) - MOST_RELATIVES:,} more"


def _success(found: Related, one: Success) -> str:
    own = "this one" if one.event.id == found.event.id else f"{one.event.type} {one.event.id}"
    return f"{own} by {one.service} at {rfc3339(one.at)}"


def _neighbour(one: Neighbour, side: str) -> str:
    key = "" if one.key is None else f", key {one.key}"
    return f"{side}: {one.event_id} at {rfc3339(one.at)}{key}, correlation {one.correlation_id}"


def _branch(chain: Chain, root: LineageEvent, start: float, seen: set[str]) -> Iterator[str]:
    ahead = [(root, "", "")]
    while ahead:  # not by recursion: nobody bounds how deep others let it become
        event, lead, under = ahead.pop()
        if event.id in seen:
            yield f"{lead}{event.type} ({event.id}) again: its causes go round"
            continue
        seen.add(event.id)
        yield f"{lead}{_told(event, start)}"
        last = True
        for child in reversed(chain.children(event)):
            corner, stem = ("└─ ", "   ") if last else ("├─ ", "│  ")
            ahead.append((child, f"{under}{corner}", f"{under}{stem}"))
            last = False


def _told(event: LineageEvent, start: float) -> str:
    handled = ", ".join(_outcome(event, one) for one in event.handlings) or "not handled"
    return f"{event.type}  +{_length(event.time - start)}  {event.source}  {event.id}  [{handled}]"


def event_line(event: LineageEvent) -> str:
    """Return one event in a line."""
    return f"{event.type} {event.id} at {rfc3339(event.time)} from {event.source}"


def _outcome(event: LineageEvent, one: Handling) -> str:
    if one.outcome is LineageOutcome.DEAD_LETTERED:
        return f"dead letter of {one.service}: {one.error or 'no reason is known'}"
    return f"{one.service} after {_length(max(0.0, one.at - event.time))}"


def _length(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < _MINUTE else age(seconds)


def _missing(one: MissingEvent) -> str:
    what = " or ".join(one.any_of)
    if one.due_at is None:
        return f"missing: {what}: {one.why}"
    due = rfc3339(one.due_at)
    if one.overdue_seconds is None:
        return f"expected: {what} after {one.after_type} {one.after}, until {due}: {one.why}"
    since = f"overdue since {due} ({age(one.overdue_seconds)})"
    return f"missing: {what} after {one.after_type} {one.after}, {since}: {one.why}"
