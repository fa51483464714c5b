"""Which dead letters are meant: whole groups, named ones, or all that a filter matches.

The manifest: which dead letters a plan sends, in which order, frozen by a hash.

Within a key the order of the source is kept. The canary goes first; it holds the first
messages of some keys, never a later one without those before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK
from holdfast.db.text import cut
from holdfast.dlq.store.overtaking import place_of
from holdfast.dlq.store.rows import PENDING, key_hash
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that all hold; an empty selection is refused where something is done."""

    groups: tuple[str, ...] = ()
    """Full ids of failure groups."""
    dlq_ids: tuple[str, ...] = ()
    consumer_group: str | None = None
    topic: str | None = None
    kind: str | None = None
    """The class: poison, transient, dependency, timeout or unknown."""
    error: str | None = None
    """The exception's type, whole or its last part."""
    tenant: str | None = None
    version: str | None = None
    key: str | None = None
    correlation: str | None = None
    """The correlation id, by which what belongs to one business case is found."""
    since: float | None = None
    until: float | None = None
    due: bool = False
    """Only what triage has put down for a retry that is due by now."""
    state: str | None = PENDING

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since > self.until:
            raise ConfigurationError("the selection ends before it begins: swap since and until")

    @property
    def is_empty(self) -> bool:
        """Whether everything is meant."""
        return not any(value for name, value in asdict(self).items() if name != "state")

    def where(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the table of dead letters."""
        columns = message.c
        equal = (
            (columns.consumer_group, self.consumer_group),
            (columns.topic, self.topic),
            (columns["class"], self.kind),
            (columns.tenant, self.tenant),
            (columns.service_version, self.version),
            (columns.state, self.state),
            (columns.correlation_id, cut(self.correlation)),
            (columns.key_hash, None if self.key is None else key_hash(self.key.encode())),
        )
        found = [column == value for column, value in equal if value is not None]
        if self.groups:
            found.append(columns.group_id.in_(self.groups))
        if self.dlq_ids:
            found.append(columns.dlq_id.in_(self.dlq_ids))
        if self.error is not None:
            tail = columns.error_type.endswith(f".{self.error}", autoescape=True)
            found.append((columns.error_type == self.error) | tail)
        if self.due:
            found.append(columns.due_at <= SYSTEM_CLOCK.now().timestamp())
        if self.since is not None:
            found.append(columns.last_failed_at >= self.since)
        if self.until is not None:
            found.append(columns.last_failed_at < self.until)
        return found

    def described(self) -> dict[str, Any]:
        """Return what was asked for, for the plan and the audit trail."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterRef:
    """What a plan needs to know of a dead letter; never its payload."""

    dlq_id: str
    topic: str
    group: str
    partition: int
    position: int | str
    key: bytes | None
    fingerprint: str | None = None
    version: str | None = None
    tenant: str | None = None
    replays: int = 0
    """How often people had it replayed; automatic retries have a limit of their own."""
    event_at: datetime | None = None
    seq: int = 0
    """In which order the store received it: the order of a source that has none."""
    failure_group: str = ""
    handler: str = ""

    @property
    def key_hash(self) -> str:
        """Which key it belongs to, of which topic and group; without a key it is its own."""
        own = self.key if self.key is not None else b"\x00" + self.dlq_id.encode()
        scope = f"{self.topic}\x1f{self.group}\x1f".encode()
        return hashlib.sha256(scope + own).hexdigest()[:32]

    @property
    def stratum(self) -> tuple[str | None, str | None]:
        """Failures of one kind by one version of the service."""
        return self.fingerprint, self.version


def in_source_order(candidates: Iterable[LetterRef]) -> list[LetterRef]:
    """Return *candidates* as their topics had them, one of each lane in turn.

    A key lives in one lane, so its order is kept, and no lane gets everything at once. Where
    positions are only names, the order is that in which the store received them.
    """
    ordered = sorted(
        candidates,
        key=lambda c: (c.topic, c.group, c.partition, place_of(c.position) or (), c.seq, c.dlq_id),
    )
    ranks: Counter[tuple[str, str, int]] = Counter()
    ranked = []
    for candidate in ordered:
        lane = candidate.topic, candidate.group, candidate.partition
        ranked.append((ranks[lane], candidate))
        ranks[lane] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in ranked]


def arranged(ordered: Sequence[LetterRef], canary: int) -> list[LetterRef]:
    """Return *ordered* with a canary of the given size in front, spread over the strata."""
    chosen = _canary(ordered, min(canary, len(ordered)))
    first = [candidate for index, candidate in enumerate(ordered) if index in chosen]
    return first + [c for index, c in enumerate(ordered) if index not in chosen]


def _canary(ordered: Sequence[LetterRef], size: int) -> set[int]:
    strata: dict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    seen: set[str] = set()
    for index, candidate in enumerate(ordered):
        if (key := candidate.key_hash) not in seen:  # only the first of a key may go ahead
            seen.add(key)
            strata[candidate.stratum].append(index)
    chosen: set[int] = set()
    rows = [iter(indexes) for indexes in strata.values()]
    while rows and len(chosen) < size:
        for row in list(rows):
            first = next(row, None)
            if first is None:
                rows.remove(row)
            elif len(chosen) < size:
                chosen.add(first)
    # Few keys: fill up from the front, which keeps every key's own order.
    for index in range(len(ordered)):
        if len(chosen) >= size:
            break
        chosen.add(index)
    return chosen


def digest(ids: Iterable[str]) -> str:
    """Return the hash over *ids* in their order: two manifests with one hash are the same."""
    total = hashlib.sha256()
    for dlq_id in ids:
        total.update(dlq_id.encode())
        total.update(b"\n")
    return total.hexdigest()
