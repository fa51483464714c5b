"""Where a replay goes: the topic of a message that failed, made ready before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import UnknownTopic, Unsupported
from holdfast.headers import replay_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.ports import Broker

Place = tuple[str, str]
"""The original topic, and the group that failed."""

SHARED = "shared"
"""Back to the original topic, where every other group lets the message pass."""


def target_topic(topic: str, group: str, to_topic: str | None) -> str:
    """Return the topic for a message of *topic* that failed in *group*."""
    if to_topic is None:
        return replay_topic(topic, group)
    return topic if to_topic == SHARED else to_topic


class Target:
    """Makes topics ready: a private one is made when first needed, others must be there."""

    def __init__(self, broker: Broker, to_topic: str | None) -> None:
        self._broker = broker
        self._to_topic = to_topic
        self._ready: set[Place] = set()

    def prepare(self, places: Iterable[Place]) -> None:
        """Return once messages of *places* can be published."""
        for place in places:
            if place not in self._ready:
                self._prepare(*place)
                self._ready.add(place)

    def _prepare(self, original: str, group: str) -> None:
        topic = target_topic(original, group, self._to_topic)
        if self._to_topic is None:
            lanes = self._lanes(group, original)
            if lanes == 0:
                raise UnknownTopic(original, "create it first: its replay topic gets as many lanes")
            self._broker.create_topic(topic, partitions=1 if lanes is None else lanes)
        elif self._lanes(group, topic) == 0:
            raise UnknownTopic(topic, "create it first, or leave --to-topic out to use the group's")

    def _lanes(self, group: str, topic: str) -> int | None:
        """Return how many lanes *topic* has; None where the broker cannot tell."""
        try:
            return len(self._broker.lag(group, [topic]))
        except UnknownTopic:
            return 0
        except Unsupported:
            return None
