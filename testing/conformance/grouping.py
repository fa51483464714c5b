"""What a new group gets, and how it is known that it gets anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import Unsupported

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage


class GroupingPromises:
    """What is published is kept for every group that was created, for later ones as declared."""

    def test_a_created_group_gets_what_is_published_before_its_first_member(
        self, stage: ConformanceStage
    ) -> None:
        """`create_group` is enough; a deployment need not start a consumer first."""
        topic = stage.topic(partitions=2)
        group = f"{stage.group}-created"
        stage.broker.create_group(topic, group)
        stage.publish(topic, b"a", b"b")
        member = stage.member(topic, group=group)
        member.accept(*member.take(2))
        assert set(member.bodies) == {b"a", b"b"}

    def test_a_late_group_gets_what_was_published_before_it_only_as_declared(
        self, stage: ConformanceStage
    ) -> None:
        """All that is still kept with `late_groups`; without it what comes after, and no more."""
        topic = stage.topic(partitions=1)
        stage.publish(topic, b"early", key=b"k")
        group = f"{stage.group}-late"
        stage.broker.create_group(topic, group)
        stage.publish(topic, b"after", key=b"k")
        member = stage.member(topic, group=group)
        expected = [b"early", b"after"] if stage.caps.late_groups else [b"after"]
        member.accept(*member.take(len(expected)))
        assert member.bodies == expected

    def test_pruning_deletes_what_every_group_settled_and_nothing_else(
        self, stage: ConformanceStage
    ) -> None:
        """What a group that was only created has not read stays; without `prune` it is refused."""
        topic = stage.topic(partitions=1)
        if not stage.caps.prune:
            with pytest.raises(Unsupported):
                stage.broker.prune([topic], older_than=0.0)
            return
        stage.publish(topic, b"a", b"b", b"c", key=b"k")
        member = stage.member(topic)
        first, *_ = member.take(3)
        member.accept(first)
        member.source.flush()
        slow = f"{stage.group}-slow"
        stage.broker.create_group(topic, slow)
        assert not stage.broker.prune([topic], older_than=-1.0)
        reader = stage.member(topic, group=slow)
        reader.accept(*reader.take(3))
        reader.source.flush()
        assert stage.broker.prune([topic], older_than=-1.0, dry_run=True) == {topic: 1}
        assert stage.broker.prune([topic], older_than=-1.0) == {topic: 1}
        assert stage.leftovers(topic) == [b"b", b"c"]

    def test_has_group_tells_whether_messages_are_kept_for_a_group(
        self, stage: ConformanceStage
    ) -> None:
        """True after `create_group`, false for a topic that nobody made; asking makes nothing."""
        topic, unknown = stage.topic(partitions=2), stage.unknown_topic()
        group, late = f"{stage.group}-asked", stage.caps.late_groups
        assert stage.broker.has_group(unknown, group) in {False, late}
        assert [stage.broker.has_group(topic, group) for _ in range(2)] == [late, late]
        stage.broker.create_group(topic, group)
        assert stage.broker.has_group(topic, group)

    def test_a_source_makes_its_group(self, stage: ConformanceStage) -> None:
        """A member that is there counts as well as `create_group`."""
        topic = stage.topic(partitions=1)
        group = f"{stage.group}-came"
        member = stage.member(topic, group=group)
        assert stage.broker.has_group(topic, group)
        stage.publish(topic, b"a")
        member.accept(*member.take(1))

    def test_creating_a_group_again_changes_nothing(self, stage: ConformanceStage) -> None:
        """An existing group stays where it is: nothing comes twice, nothing is lost."""
        topic = stage.topic(partitions=1)
        stage.publish(topic, b"a", b"b", key=b"k")
        member = stage.member(topic)
        member.accept(*member.take(1))
        member.source.flush()
        stage.broker.create_group(topic, stage.group)
        assert stage.leftovers(topic) == [b"b"]
