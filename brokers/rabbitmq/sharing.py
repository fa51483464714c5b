"""How lanes are shared: decisions from what each member can see, without any talk among them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How things stand in one topic, as one member sees them."""

    topic: str
    lanes: int
    members: int
    """Members of the group in this topic, oneself included."""
    hungry: int
    """Other members that have less than their share."""
    owned: frozenset[int]

    @property
    def share(self) -> Fraction:
        """How many lanes each member should have; at least oneself is there."""
        return Fraction(self.lanes, max(self.members, 1))


@dataclass(frozen=True, slots=True)
class Balance:
    """What one member should do; the topics are weighed together.

    A member keeps at most its share rounded up, and gives a lane above its share rounded
    down to a member that has less than that.
    """

    standings: Sequence[Standing]

    @property
    def _share(self) -> Fraction:
        return sum((s.share for s in self.standings), Fraction(0))

    @property
    def _owned(self) -> int:
        return sum(len(s.owned) for s in self.standings)

    @property
    def is_hungry(self) -> bool:
        """Whether this member has less than its share rounded down."""
        return self._owned < math.floor(self._share)

    @property
    def room(self) -> int:
        """How many free lanes this member may take."""
        if not self.is_hungry and any(s.hungry for s in self.standings):
            return 0  # what is free now was given up for somebody else
        return max(math.ceil(self._share) - self._owned, 0)

    def surplus(self) -> list[Lane]:
        """Return the lanes to give up, from the topics where most is held above the share."""
        most, least = math.ceil(self._share), math.floor(self._share)
        count = max(self._owned - most, 0)
        if not count and self._owned > least and any(s.hungry and s.owned for s in self.standings):
            count = 1
        held = {s.topic: sorted(s.owned) for s in self.standings if s.members > 1 and s.owned}
        by_topic = {s.topic: s for s in self.standings}

        def need(topic: str) -> tuple[bool, Fraction]:
            standing = by_topic[topic]
            return standing.hungry > 0, len(held[topic]) - standing.share

        given: list[Lane] = []
        while len(given) < count and held:
            topic = max(held, key=need)
            given.append(Lane(topic, held[topic].pop()))
            if not held[topic]:
                del held[topic]
        return given
