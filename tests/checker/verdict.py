"""What really reached the broker, against what was committed."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.testing import Violation, check_nothing_left

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

Event = tuple[str, int]
"""A key, and the event's number in it."""

_MOST_SHOWN, _MOST_TOLD = 5, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An event that a table still holds."""

    event: Event
    table: str
    shard: int
    owner: str | None
    """The relay that may publish it now."""
    why: str = ""
    """Of a parked event: its state, and what the broker said."""

    def __str__(self) -> str:
        owner = "that nobody owns" if self.owner is None else f"of relay {self.owner}"
        why = f" ({self.why})" if self.why else ""
        return f"in {self.table}{why}, shard {self.shard} {owner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stood when a run had had its time to settle, with the relays still at work."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """By place: rows, shards without an owner, log that is not confirmed, unread messages."""
    rows: Sequence[Row] = ()
    stored: Collection[Event] = ()
    """What another reader found at the broker."""

    def where(self, event: Event) -> str:
        """Say where *event* is, which was not read."""
        places = [str(row) for row in self.rows if row.event == event]
        if event in self.stored:
            places.append("published, but not read")
        return " and ".join(places) or "nowhere"


@dataclass(slots=True)
class Verdict:
    """Losses, order violations, phantoms and what stands still; duplicates are only counted."""

    lost: list[Event] = field(default_factory=list)
    disorder: list[Event] = field(default_factory=list)
    phantoms: list[Event] = field(default_factory=list)
    left: list[object] = field(default_factory=list)
    """What had not settled in time, by place."""
    where: list[str] = field(default_factory=list)
    """Where the first of the lost events are, and what else stands."""
    events: int = 0
    duplicates: int = 0
    kills: int = 0
    """Relays that were at work and died by SIGKILL."""
    restarts: int = 0
    """Servers killed and started again."""

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.disorder or self.phantoms or self.left)

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.kills} relays killed, {self.restarts} servers restarted, "
            f"{self.duplicates} duplicates ({self.duplicates / max(self.kills, 1):.0f} per kill), "
            f"lost {self.lost[:_MOST_SHOWN]}, "
            f"out of order {self.disorder[:_MOST_SHOWN]}, "
            f"rolled back but published {self.phantoms[:_MOST_SHOWN]}, "
            f"left standing {self.left}" + "".join(f"\n  {line}" for line in self.where)
        )


def events_of(bodies: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events that *bodies* tell of."""
    for body in bodies:
        event = json.loads(body)
        yield event["key"], event["n"]


def judge(
    committed: Mapping[str, int], bodies: Iterable[bytes], standing: Standing | None = None
) -> Verdict:
    """Compare the *bodies* in the order they were stored with the *committed* counts.

    The first occurrence of each event counts for order; a later one is a duplicate, which
    the consumer's dedup absorbs. Whatever is *standing* is a broken promise of its own, also
    when every event was published.
    """
    standing = Standing() if standing is None else standing
    verdict = Verdict(events=sum(committed.values()))
    seen: dict[str, set[int]] = defaultdict(set)
    highest: dict[str, int] = defaultdict(int)
    for key, n in events_of(bodies):
        if n in seen[key]:
            verdict.duplicates += 1
            continue
        seen[key].add(n)
        if n < highest[key]:
            verdict.disorder.append((key, n))
        highest[key] = max(highest[key], n)
        if n > committed[key]:
            verdict.phantoms.append((key, n))
    verdict.lost = [
        (key, n) for key, count in committed.items() for n in range(1, count + 1)
        if n not in seen[key]
    ]  # fmt: skip
    try:
        check_nothing_left(standing.counts)
    except Violation as violation:
        verdict.left = list(violation.witnesses)
    # What was published and still stands is told as well: it stands for a reason.
    of_interest = [*verdict.lost, *(row.event for row in standing.rows)]
    verdict.where = [
        f"{key} {n}: {standing.where((key, n))}"
        for key, n in list(dict.fromkeys(of_interest))[:_MOST_TOLD]
    ]
    return verdict
