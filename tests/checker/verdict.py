"""What really reached the broker, against what was committed."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(slots=True)
class Verdict:
    """Losses, order violations and phantoms; duplicates are counted, not forbidden."""

    lost: list[tuple[str, int]] = field(default_factory=list)
    disorder: list[tuple[str, int]] = field(default_factory=list)
    phantoms: list[tuple[str, int]] = field(default_factory=list)
    events: int = 0
    duplicates: int = 0
    kills: int = 0
    """Relays that were at work and died by SIGKILL."""
    restarts: int = 0
    """Servers killed and started again."""

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.disorder or self.phantoms)

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.kills} relays killed, {self.restarts} servers restarted, "
            f"{self.duplicates} duplicates ({self.duplicates / max(self.kills, 1):.0f} per kill), "
            f"lost {self.lost[:5]}, "
            f"out of order {self.disorder[:5]}, rolled back but published {self.phantoms[:5]}"
        )


def judge(committed: Mapping[str, int], bodies: Iterable[bytes]) -> Verdict:
    """Compare the *bodies* in the order they were stored with the *committed* counts.

    The first occurrence of each event counts for order; a later one is a duplicate, which
    the consumer's dedup absorbs.
    """
    verdict = Verdict(events=sum(committed.values()))
    seen: dict[str, set[int]] = defaultdict(set)
    highest: dict[str, int] = defaultdict(int)
    for body in bodies:
        event = json.loads(body)
        key, n = event["key"], event["n"]
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
    return verdict
