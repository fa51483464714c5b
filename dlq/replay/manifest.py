"""The manifest: which dead letters a plan sends, in which order, frozen by a hash.

Within a key the order of the source is kept. The canary goes first; it holds the first
messages of some keys, never a later one without those before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.dlq.positions import place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
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


def in_source_order(candidates: Iterable[Candidate]) -> list[Candidate]:
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


def arranged(ordered: Sequence[Candidate], canary: int) -> list[Candidate]:
    """Return *ordered* with a canary of the given size in front, spread over the strata."""
    chosen = _canary(ordered, min(canary, len(ordered)))
    first = [candidate for index, candidate in enumerate(ordered) if index in chosen]
    return first + [c for index, c in enumerate(ordered) if index not in chosen]


def _canary(ordered: Sequence[Candidate], size: int) -> set[int]:
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
