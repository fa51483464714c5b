"""What a broker that tells how far a group is promises by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UnknownGroup, UnknownTopic, Unsupported
from holdfast.ports import BrokerPowers, Lane, Settle

if TYPE_CHECKING:
    from holdfast.ports import GroupProgress, LaneProgress
    from holdfast.testing.conformance.stage import ConformanceStage


class LaggingPromises:
    """`BrokerPowers.progress` agrees with what was published, handed out and settled."""

    def test_progress_agrees_with_what_was_settled(self, stage: ConformanceStage) -> None:
        """The group goes on at the first message that is not settled, whose age is told."""
        topic = stage.topic(partitions=1)
        if not _tells(stage, topic):
            return
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c", b"d", key=b"k")
        first, second, third, last = member.take(4)
        member.accept(first, second)
        member.source.flush()
        stage.until(lambda: _lane(stage, topic).unsettled == 2, member, what="two are settled")
        lane = _lane(stage, topic)
        assert lane.committed in {None, third.position}
        assert (lane.oldest is None) or lane.oldest == pytest.approx(third.timestamp, abs=0.01)
        end = last.position + 1 if isinstance(last.position, int) else last.position
        assert lane.end in {None, end}
        member.accept(third, last)
        member.source.flush()
        stage.until(lambda: _lane(stage, topic).unsettled == 0, member, what="all are settled")
        lane = _lane(stage, topic)
        assert (lane.committed, lane.oldest, lane.deleted) == (lane.end, None, 0)

    def test_progress_counts_what_was_published_since(self, stage: ConformanceStage) -> None:
        """A group without members falls behind by every message, and nobody is counted as one."""
        topic = stage.topic(partitions=1)
        if not _tells(stage, topic):
            return
        stage.publish(topic, b"a", b"b", key=b"k")
        member = stage.member(topic)
        member.accept(*member.take(2))
        stage.until(lambda: _members(stage, topic) == 1, member, what="the member is counted")
        member.close()
        before = _lane(stage, topic)
        stage.publish(topic, b"c", b"d", b"e", key=b"k")
        after = _lane(stage, topic)
        assert (before.unsettled, after.unsettled) == (0, 3)
        if isinstance(before.committed, int) and stage.caps.settle is Settle.CUMULATIVE:
            assert after.committed == before.committed
        assert _members(stage, topic) == 0

    def test_the_topics_of_a_group_are_found(self, stage: ConformanceStage) -> None:
        """All that it reads or has read, and no other; or topics must be named."""
        read, other = [stage.topic(partitions=1), stage.topic(partitions=2)], stage.topic()
        if not _tells(stage, other):
            return
        member = stage.member(*read)
        for topic in read:
            stage.publish(topic, b"a")
        stage.publish(other, b"a")
        member.accept(*member.take(2))
        member.source.flush()
        for _ in ("while it reads", "after it has left"):
            try:
                found = _asked(stage)
            except Unsupported:
                found = _asked(stage, *read)
            assert sorted(found.lanes) == [Lane(read[0], 0), Lane(read[1], 0), Lane(read[1], 1)]
            member.close()

    def test_a_group_or_topic_that_does_not_exist_is_an_error(
        self, stage: ConformanceStage
    ) -> None:
        """Nobody is told that all is well because of a name that was misspelt."""
        topic, unknown = stage.topic(partitions=1), stage.unknown_topic()
        if not _tells(stage, topic):
            return
        member = stage.member(topic)
        stage.publish(topic, b"a")
        member.accept(*member.take(1))
        member.source.flush()
        with pytest.raises(UnknownGroup, match="nobody"):
            BrokerPowers.of(stage.broker).progress(f"{stage.group}-nobody", [topic])
        with pytest.raises(UnknownTopic, match=unknown):
            _asked(stage, unknown)


def _tells(stage: ConformanceStage, topic: str) -> bool:
    """Whether the broker declares that it tells; one that does not refuses."""
    powers = BrokerPowers.of(stage.broker)
    if not powers.tells_progress:
        with pytest.raises(Unsupported):
            powers.progress(stage.group, [topic])
    return powers.tells_progress


def _asked(stage: ConformanceStage, *topics: str) -> GroupProgress:
    """Return how far the stage's group is in *topics*, or in all that are its own."""
    return BrokerPowers.of(stage.broker).progress(stage.group, topics or None)


def _lane(stage: ConformanceStage, topic: str) -> LaneProgress:
    [lane] = _asked(stage, topic).lanes.values()
    return lane


def _members(stage: ConformanceStage, topic: str) -> int:
    return _asked(stage, topic).members[topic]
