"""Where a replayed message goes: to the group that failed, and to nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.dlq.replay.marks import Marks, replay_topic
from holdfast.errors import UnknownTopic, Unsupported

if TYPE_CHECKING:
    from holdfast.dlq.replay.letters import Outgoing
    from holdfast.message import Message
    from holdfast.ports import Broker

SHARED = "shared"
"""Back to the original topic, where every other group lets the message pass."""


def target_topic(topic: str, group: str, to_topic: str | None) -> str:
    """Return the topic for a message of *topic* that failed in *group*."""
    if to_topic is None:
        return replay_topic(topic, group)
    return topic if to_topic == SHARED else to_topic


class Target:
    """Addresses messages; a private topic is made when first needed, others must be there."""

    def __init__(self, broker: Broker, to_topic: str | None) -> None:
        self._broker = broker
        self._to_topic = to_topic
        self._ready: dict[tuple[str, str], str] = {}

    def addressed(self, one: Outgoing, plan_id: str) -> Message:
        """Return the message with its marks, under the topic it is to be published to."""
        message, group = one.message, one.group
        place = message.topic, group
        topic = self._ready.get(place)
        if topic is None:
            topic = self._ready[place] = self._prepared(message.topic, group)
        marks = Marks(
            group=group, plan=plan_id, dlq_id=one.dlq_id, topic=message.topic, count=one.count
        )
        return message.with_(topic=topic, headers=marks.stamped(message.headers))

    def _prepared(self, original: str, group: str) -> str:
        topic = target_topic(original, group, self._to_topic)
        if self._to_topic is None:
            self._broker.create_topic(topic, partitions=self._lanes(group, original) or 1)
        elif self._lanes(group, topic) == 0:
            raise UnknownTopic(topic, "create it first, or leave --to-topic out to use the group's")
        return topic

    def _lanes(self, group: str, topic: str) -> int | None:
        """Return how many lanes *topic* has; None where the broker cannot tell."""
        try:
            return len(self._broker.lag(group, [topic]))
        except UnknownTopic:
            return 0
        except Unsupported:
            return None
