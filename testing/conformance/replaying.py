"""What seeking promises."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest

from holdfast.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage

_APART = 0.05


class ReplayingPromises:
    """A group can be moved back where `replay` is declared."""

    def test_seek_to_an_offset_hands_out_from_there(self, stage: ConformanceStage) -> None:
        """The message at the offset and all later ones come again."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        bodies = [b"%d" % n for n in range(5)]
        stage.publish(topic, *bodies)
        came = member.take(5)
        member.accept(*came)
        member.source.flush()
        lane, offset = came[2].lane, cast("int", came[2].position)
        if not stage.caps.replay:
            with pytest.raises(Unsupported):
                member.source.seek(lane, offset=offset)
            return
        member.source.seek(lane, offset=offset)
        assert [delivery.body for delivery in member.take(3)] == bodies[2:]
        assert not member.idle(stage.hooks.quiet)

    def test_seek_moves_the_group_and_not_just_the_member(self, stage: ConformanceStage) -> None:
        """What comes again by a seek is unsettled: the next member gets it."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        bodies = [b"%d" % n for n in range(4)]
        stage.publish(topic, *bodies)
        came = member.take(4)
        member.accept(*came)
        member.source.flush()
        lane, offset = came[1].lane, cast("int", came[1].position)
        if not stage.caps.replay:
            with pytest.raises(Unsupported):
                member.source.seek(lane, offset=offset)
            return
        member.source.seek(lane, offset=offset)
        first, *_ = member.take(3)
        member.accept(first)
        assert stage.leftovers(topic) == bodies[2:]

    def test_seek_beyond_the_end_skips_nothing(self, stage: ConformanceStage) -> None:
        """It is refused, or the next message to be stored comes all the same."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        member.accept(delivery)
        member.source.flush()
        if isinstance(delivery.position, int):
            with suppress(ConfigurationError):  # Unsupported is one
                member.source.seek(delivery.lane, offset=delivery.position + 1000)
        stage.publish(topic, b"b")
        stage.until(lambda: b"b" in member.bodies, member, what="the next message comes")

    def test_seek_to_a_time_hands_out_what_was_stored_since(self, stage: ConformanceStage) -> None:
        """The first message stored at or after the time is the first to come again."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"early")
        [early] = member.take(1)
        stage.clock.sleep(_APART)
        stage.publish(topic, b"late", b"later")
        late, later = member.take(2)
        member.accept(early, late, later)
        member.source.flush()
        if not stage.caps.replay:
            with pytest.raises(Unsupported):
                member.source.seek(late.lane, time=stage.clock.now())
            return
        assert early.timestamp is not None, "a broker that seeks to a time knows its timestamps"
        assert late.timestamp is not None
        between = datetime.fromtimestamp((early.timestamp + late.timestamp) / 2, UTC)
        member.source.seek(late.lane, time=between)
        assert [delivery.body for delivery in member.take(2)] == [b"late", b"later"]
        assert not member.idle(stage.hooks.quiet)
