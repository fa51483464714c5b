"""Dead letters that wait on broker topics and are in no store yet: the broker may forget them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.topic import COLLECTOR
from holdfast.errors import UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.ports import Broker

DAY = 86_400.0


def uncollected(broker: Broker, topics: Sequence[str], group: str = COLLECTOR) -> dict[str, int]:
    """Return how many letters of each of *topics* the collecting *group* has not stored yet."""
    found = {}
    for topic in topics:
        try:
            found[topic] = sum(broker.lag(group, [topic]).values())
        except UnknownTopic:
            found[topic] = 0  # it is made with its first dead letter
    return found


@dataclass(slots=True, kw_only=True)
class Uncollected:
    """Asked now and then, it remembers since when letters wait and none is collected.

    That is at most the age of the oldest one, for it begins when this process first looks.
    *retention* says for how long the broker keeps which topic; `*` stands for all others.
    """

    broker: Broker
    topics: Sequence[str]
    group: str = COLLECTOR
    retention: dict[str, float] = field(default_factory=dict)
    clock: Clock = SYSTEM_CLOCK
    letters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """For how long the longest waiting topic has not moved."""
    expiring: int = 0
    """Letters of topics that the broker's retention reaches within a day."""
    _since: dict[str, float] = field(default_factory=dict)

    def sample(self) -> None:
        """Count what waits now, by topic, and for how long."""
        now = self.clock.monotonic()
        found = uncollected(self.broker, self.topics, self.group)
        self.seconds, self.expiring = 0.0, 0
        for topic, count in found.items():
            moved = count < self.letters.get(topic, 0) or not count
            since = now if moved else self._since.get(topic, now)
            self._since[topic] = since
            self.seconds = max(self.seconds, now - since)
            kept = self.retention.get(topic, self.retention.get("*"))
            if kept is not None and count and now - since > kept - DAY:
                self.expiring += count
        self.letters = found
