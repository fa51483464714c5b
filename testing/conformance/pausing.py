"""What pausing promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import Unsupported
from holdfast.message import Message
from holdfast.ports import Pause
from holdfast.testing.conformance.hooks import waits_for_expiry

if TYPE_CHECKING:
    from holdfast.testing.conformance.recording import RecordedMember
    from holdfast.testing.conformance.stage import ConformanceStage

_KEYS = 12
_ORDERS = (
    ("pause", "resume", "leave", "return"),
    ("pause", "leave", "resume", "return"),
    ("pause", "leave", "return", "resume"),
    ("leave", "pause", "resume", "return"),
    ("leave", "pause", "return", "resume"),
    ("leave", "return", "pause", "resume"),
)
"""Every way in which a pause can meet a rebalance that takes lanes and brings them back."""


class PausingPromises:
    """Paused lanes hand out nothing, and the member stays a member."""

    def test_pause_stops_the_paused_lanes_and_no_others(self, stage: ConformanceStage) -> None:
        """One lane with LANE, all of them with ALL; `resume` undoes it."""
        topic = stage.topic()
        member = stage.member(topic)
        _publish_round(stage, topic, 1)
        member.accept(*member.take(_KEYS))
        lane_of = {delivery.key: delivery.lane for delivery in member.inbox}
        owned = member.source.assignment()
        paused = {min(lane_of.values())} if stage.caps.pause is Pause.LANE else set(owned)
        if stage.caps.pause is Pause.NONE:
            with pytest.raises(Unsupported):
                member.source.pause(paused)
            return
        member.source.pause(paused)
        member.inbox.clear()
        _publish_round(stage, topic, 2)
        expected = {key for key, lane in lane_of.items() if lane not in paused}
        _take_keys(stage, member, expected)
        member.idle(stage.hooks.quiet)
        assert {delivery.key for delivery in member.inbox} == expected
        member.source.resume(paused)
        _take_keys(stage, member, set(lane_of))

    def test_a_part_of_the_lanes_is_paused_only_as_declared(self, stage: ConformanceStage) -> None:
        """A broker that pauses all or nothing refuses to pause some."""
        topic = stage.topic()
        member = stage.member(topic)
        stage.share(topic, member)
        owned = member.source.assignment()
        part = {min(owned)}
        if stage.caps.pause is Pause.LANE or (stage.caps.pause is Pause.ALL and part == owned):
            member.source.pause(part)
            member.source.resume(part)
        else:
            with pytest.raises(Unsupported):
                member.source.pause(part)

    def test_a_rebalance_does_not_resume(self, stage: ConformanceStage) -> None:
        """Lanes that stayed, or left and came back, are still paused."""
        topic = stage.topic()
        member = stage.member(topic)
        stage.share(topic, member)
        if stage.caps.pause is Pause.NONE:
            with pytest.raises(Unsupported):
                member.source.pause(member.source.assignment())
            return
        paused = member.source.assignment()
        member.source.pause(paused)
        rival = stage.member(topic)
        stage.share(topic, member, rival)
        rival.close()
        stage.share(topic, member)
        _publish_round(stage, topic, 1)
        assert not member.idle(stage.hooks.quiet)
        member.source.resume(paused)
        assert len(member.take(_KEYS)) == _KEYS

    def test_what_is_paused_and_resumed_around_a_rebalance_is_read_again(
        self, stage: ConformanceStage
    ) -> None:
        """In whatever order it is paused, goes, comes back and is resumed: nothing stands still.

        Clients keep a pause of their own over a rebalance, or forget it. Only what was wanted
        last counts when a lane comes back.
        """
        topic = stage.topic()
        member = stage.member(topic)
        stage.share(topic, member)
        lanes = member.source.assignment()
        if stage.caps.pause is Pause.NONE:
            with pytest.raises(Unsupported):
                member.source.pause(lanes)
            return
        for number, order in enumerate(_ORDERS):
            is_paused, rival = False, None
            for step in order:
                match step:
                    case "pause" | "resume":
                        is_paused = step == "pause"
                        getattr(member.source, step)(lanes)
                    case "leave":
                        rival = stage.member(topic)
                        stage.share(topic, member, rival)
                    case "return" if rival is not None:
                        rival.close()
                        stage.share(topic, member)
                        _publish_round(stage, topic, number)
                        if is_paused:
                            assert not member.idle(stage.hooks.quiet), order
            _read_round(stage, member, number)

    @waits_for_expiry
    def test_polling_keeps_the_membership_while_all_is_paused(
        self, stage: ConformanceStage
    ) -> None:
        """Nothing is revoked or lost for longer than the broker waits for a silent member."""
        topic = stage.topic()
        member, rival = stage.member(topic), stage.member(topic)
        stage.share(topic, member, rival)
        owned = member.source.assignment()
        if stage.caps.pause is not Pause.NONE:
            member.source.pause(owned)
        news = len(stage.chronicle.heard)
        session = 0.0 if stage.hooks.session is None else stage.hooks.session
        until = stage.clock.monotonic() + max(1.5 * session, stage.hooks.quiet)
        while stage.clock.monotonic() < until:
            member.poll()
            rival.poll()
        assert stage.chronicle.heard[news:] == []
        assert member.source.assignment() == owned
        rival.close()
        if stage.caps.pause is not Pause.NONE:
            member.source.resume(owned)
        _publish_round(stage, topic, 1)
        assert len(member.take(_KEYS)) == _KEYS


def _publish_round(stage: ConformanceStage, topic: str, number: int) -> None:
    stage.send(
        *(Message.new(topic, b"%d of %d" % (number, n), key=b"key %d" % n) for n in range(_KEYS))
    )


def _read_round(stage: ConformanceStage, member: RecordedMember, number: int) -> None:
    """Accept what comes until the whole round has come."""
    wanted = {b"%d of %d" % (number, n) for n in range(_KEYS)}
    member.inbox.clear()

    def is_read() -> bool:
        wanted.difference_update(member.bodies)
        member.accept(*member.inbox)
        member.inbox.clear()
        return not wanted

    stage.until(is_read, member, what=f"round {number} is read to its end")


def _take_keys(stage: ConformanceStage, member: RecordedMember, keys: set[bytes | None]) -> None:
    stage.until(
        lambda: keys <= {delivery.key for delivery in member.inbox},
        member,
        what="the lanes that are not paused go on",
    )
