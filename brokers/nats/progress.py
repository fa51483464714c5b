"""How far a group is: asked of its durable consumers, and of the streams that they read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.brokers.nats.consumers import lag_of
from holdfast.brokers.nats.jetstream import moment
from holdfast.brokers.nats.streams import consumer, subject, token
from holdfast.errors import UnknownGroup, UnknownTopic
from holdfast.ports import GroupProgress, Lane, LaneProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.nats.group import GroupRecord
    from holdfast.brokers.nats.jetstream import Answer, JetStream
    from holdfast.brokers.nats.membership import GroupBucket
    from holdfast.brokers.nats.streams import NatsTopics


class NatsProgress:
    """Looks at one group, and changes nothing."""

    def __init__(
        self, jetstream: JetStream, streams: NatsTopics, bucket: GroupBucket, group: str
    ) -> None:
        self._js = jetstream
        self._streams = streams
        self._bucket = bucket
        self._group = group
        self._state, self._revision = bucket.read(group)
        self._stored: dict[str, dict[str, int]] = {}

    def lag(self, topics: Sequence[str]) -> dict[Lane, int]:
        """Return the unsettled messages in every lane of *topics*."""
        lanes = [lane for topic in topics for lane in self._lanes(topic)]
        return {lane: self._unsettled(lane, self._consumer(lane)) for lane in lanes}

    def of(self, topics: Sequence[str] | None, broker: str) -> GroupProgress:
        """Return how far the group is in *topics*, or in all that it reads or has read."""
        lanes = [lane for topic in topics or () for lane in self._lanes(topic)]
        if not self._revision:
            raise UnknownGroup(self._group, broker)
        readers = _readers(self._state, self._bucket.server_time())
        if topics is None:
            topics = sorted({*self._state.lanes, *readers})
            left = {topic: self._streams.find(topic) or 0 for topic in topics}
            lanes = [Lane(topic, n) for topic, count in left.items() for n in range(count)]
        return GroupProgress(
            lanes={lane: self._lane(lane) for lane in lanes},
            members={topic: readers[topic] for topic in topics},
            retention=self._streams.retention(topics),
        )

    def _lanes(self, topic: str) -> list[Lane]:
        count = self._streams.find(topic)
        if count is None:
            raise UnknownTopic(topic, "there is nothing to lag behind in it")
        return [Lane(topic, n) for n in range(count)]

    def _consumer(self, lane: Lane) -> Answer | None:
        entries = self._state.lanes.get(lane.topic, [])
        seeks = entries[lane.partition].seeks if lane.partition < len(entries) else 0
        name = consumer(self._group, lane.partition, seeks)
        return self._js.consumer(token(lane.topic), name)

    def _unsettled(self, lane: Lane, info: Answer | None) -> int:
        if info is not None:
            return lag_of(info)
        if lane.topic not in self._stored:  # the group has not come here yet
            self._stored[lane.topic] = self._streams.counts(lane.topic)
        return self._stored[lane.topic].get(subject(*lane), 0)

    def _lane(self, lane: Lane) -> LaneProgress:
        info = self._consumer(lane)
        stream, name = token(lane.topic), subject(*lane)
        last = self._js.message(stream, {"last_by_subj": name})
        end = 1 if last is None else int(last["seq"]) + 1
        unsettled = self._unsettled(lane, info)
        oldest = None
        if unsettled:
            settled = 0 if info is None else int(info["ack_floor"]["stream_seq"])
            oldest = self._js.message(stream, {"seq": settled + 1, "next_by_subj": name})
        return LaneProgress(
            unsettled=unsettled,
            committed=end if oldest is None else int(oldest["seq"]),
            end=end,
            oldest=None if oldest is None else moment(oldest["time"]),
        )


def _readers(state: GroupRecord, now: float) -> Counter[str]:
    """Return how many members, of those alive at *now*, read each topic."""
    living = [member for member in state.members.values() if member.until >= now]
    return Counter(topic for member in living for topic in member.topics)
