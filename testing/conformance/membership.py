"""What membership of a group promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK
from holdfast.message import Message
from holdfast.ports import Ordering
from holdfast.testing.conformance.recording import WaitDeadline
from holdfast.testing.observed import (
    check_effects_once,
    check_nothing_lost,
    check_order_per_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.ports import Delivery, Lane
    from holdfast.testing.conformance.recording import RecordedMember
    from holdfast.testing.conformance.stage import ConformanceStage

_KEYS = 6


class MembershipPromises:
    """Members share the lanes, and a lane moves with nothing lost and nothing torn."""

    def test_a_lone_member_is_assigned_every_lane(self, stage: ConformanceStage) -> None:
        """The listener hears of what `assignment` returns."""
        topic = stage.topic()
        member = stage.member(topic)
        stage.share(topic, member)
        owned = member.source.assignment()
        assert stage.chronicle.lanes(member.name, "assigned") == owned
        assert {lane.topic for lane in owned} == {topic}

    def test_two_members_share_the_work(self, stage: ConformanceStage) -> None:
        """Both get messages, none comes to both, and a lane has one owner at a time."""
        topic = stage.topic()
        first = stage.member(topic)
        stage.share(topic, first)
        second = stage.member(topic)
        stage.share(topic, first, second)
        bodies = [b"%d" % n for n in range(24)]
        stage.publish(topic, *bodies)

        def is_done() -> bool:
            for member in (first, second):
                member.accept(*member.poll(limit=1))
            return len(first.inbox) + len(second.inbox) >= len(bodies)

        stage.until(is_done, what="everything is handed out")
        assert first.inbox
        assert second.inbox
        check_effects_once(first.bodies + second.bodies)
        if stage.exclusive:
            stage.chronicle.check_one_owner()
            _check_lanes_were_owned(stage, first, second)

    def test_members_in_threads_share_the_work(self, stage: ConformanceStage) -> None:
        """Each in a thread of its own, they lose nothing and keep the order per key."""
        topic = stage.topic()
        members = [stage.member(topic) for _ in range(2)]
        sent = [
            Message.new(topic, b"%d" % n, key=b"key %d" % (n % _KEYS)) for n in range(4 * _KEYS)
        ]
        handled: list[Delivery] = []

        def work(member: RecordedMember) -> bool:
            for delivery in member.poll(limit=3):
                handled.append(delivery)
                member.accept(delivery)
            return {delivery.body for delivery in handled} >= {message.payload for message in sent}

        # Threads that advance one virtual clock would outrun each other's sessions.
        crews = [[member] for member in members] if stage.clock is SYSTEM_CLOCK else [members]
        with ThreadPoolExecutor(len(crews)) as pool:
            futures = [pool.submit(_work_until_done, stage, crew, work) for crew in crews]
            for number in range(0, len(sent), _KEYS):
                stage.send(*sent[number : number + _KEYS])
            for future in futures:
                future.result()
        check_nothing_lost([m.payload for m in sent], [d.body for d in handled])
        if stage.caps.ordering is not Ordering.NONE:
            check_order_per_key(
                [(m.key, m.payload) for m in sent], [(d.key, d.body) for d in handled]
            )
        if stage.exclusive:
            stage.chronicle.check_one_owner()

    def test_the_lanes_of_a_leaving_member_go_to_the_rest(self, stage: ConformanceStage) -> None:
        """After a member closed, the other one gets everything."""
        topic = stage.topic()
        first, second = stage.member(topic), stage.member(topic)
        stage.share(topic, first, second)
        second.close()
        stage.share(topic, first)
        bodies = {b"%d" % n for n in range(12)}
        stage.publish(topic, *bodies)
        stage.until(lambda: bodies <= set(first.bodies), first, what="the rest gets everything")
        if stage.exclusive:
            stage.chronicle.check_one_owner()

    def test_what_a_closed_member_held_goes_to_the_next(self, stage: ConformanceStage) -> None:
        """Leaving settles nothing."""
        topic = stage.topic()
        first = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        first.take(3)
        first.close()
        second = stage.member(topic)
        assert {delivery.body for delivery in second.take(3)} == {b"a", b"b", b"c"}

    def test_work_can_be_settled_while_the_member_closes(self, stage: ConformanceStage) -> None:
        """`revoked` comes before the lanes leave: what is settled inside stays settled."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic, on_revoked=lambda lanes: _accept_all_of(member, lanes))
        stage.publish(topic, b"a", b"b")
        member.take(2)
        owned = member.source.assignment()
        member.close()
        assert stage.chronicle.lanes(member.name, "revoked") == owned
        assert stage.leftovers(topic) == []

    def test_work_can_be_settled_while_a_lane_moves(self, stage: ConformanceStage) -> None:
        """What is settled inside `revoked` is not handed to the lane's next owner."""
        topic = stage.topic()
        first = stage.member(topic, on_revoked=lambda lanes: _accept_all_of(first, lanes))
        bodies = [b"%d" % n for n in range(16)]
        stage.publish(topic, *bodies)
        first.take(16)
        second = stage.member(topic)
        stage.share(topic, first, second)
        assert not second.idle(stage.hooks.quiet)
        assert not second.inbox
        if stage.exclusive:
            stage.chronicle.check_one_owner()
            assert second.source.assignment() <= stage.chronicle.lanes(first.name, "revoked")
        first.accept(*(d for d in first.inbox if d.lane in first.source.assignment()))
        assert stage.leftovers(topic) == []

    def test_unsettled_work_goes_with_its_lane(self, stage: ConformanceStage) -> None:
        """What is not settled inside `revoked` comes to the lane's next owner."""
        topic = stage.topic()
        first = stage.member(topic)
        bodies = {b"%d" % n for n in range(16)}
        stage.publish(topic, *bodies)
        first.take(16)
        second = stage.member(topic)
        stage.share(topic, first, second)
        if stage.exclusive:
            moved = second.source.assignment()
            expected = {d.body for d in first.inbox if d.lane in moved}
            stage.until(
                lambda: expected <= set(second.bodies), first, second, what="moved work comes"
            )
        first.close()
        stage.until(lambda: bodies <= set(second.bodies), second, what="all work comes")

    def test_unsettled_work_of_a_lane_that_stays_is_not_skipped(
        self, stage: ConformanceStage
    ) -> None:
        """After a rebalance it can still be settled, or it comes again.

        By itself where the lane was revoked and came back, upon a release where it never left.
        """
        topic = stage.topic()
        first = stage.member(topic)
        bodies = [b"%d" % n for n in range(16)]
        stage.publish(topic, *bodies)
        held = first.take(16)
        news = len(stage.chronicle.heard)
        second = stage.member(topic)
        stage.share(topic, first, second)
        left = set().union(
            *(
                lanes
                for name, kind, lanes in stage.chronicle.heard[news:]
                if name == first.name and kind != "assigned"
            )
        )
        for delivery in held:
            if delivery.lane not in left:
                first.source.release(delivery, blame=False)
        stage.until(
            lambda: set(bodies) <= set(first.bodies[len(held) :] + second.bodies),
            first,
            second,
            what="everything unsettled comes again",
        )
        for member, old in ((first, len(held)), (second, 0)):
            member.accept(*member.inbox[old:])
        assert stage.leftovers(topic) == []

    def test_closing_twice_is_closing_once(self, stage: ConformanceStage) -> None:
        """Close may be repeated, and `wake` may come late."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        member.accept(*member.take(1))
        member.close()
        member.source.wake()
        member.close()
        assert stage.leftovers(topic) == []

    def test_a_member_that_never_polled_can_close(self, stage: ConformanceStage) -> None:
        """Opening and closing at once leaves the group as it was."""
        topic = stage.topic(partitions=1)
        stage.member(topic).close()
        stage.publish(topic, b"a")
        assert stage.leftovers(topic) == [b"a"]


def _work_until_done(
    stage: ConformanceStage,
    members: Sequence[RecordedMember],
    work: Callable[[RecordedMember], bool],
) -> None:
    deadline = WaitDeadline(stage.hooks.settle_in)
    is_done = False
    while not is_done:
        deadline.check("everything is handled", [member.bodies for member in members])
        for member in members:
            is_done = work(member)


def _accept_all_of(member: RecordedMember, lanes: set[Lane]) -> None:
    member.accept(*(delivery for delivery in member.inbox if delivery.lane in lanes))
    member.source.flush()


def _check_lanes_were_owned(stage: ConformanceStage, *members: RecordedMember) -> None:
    """Check that nobody was handed a message of a lane never assigned to them."""
    for member in members:
        assigned = stage.chronicle.lanes(member.name, "assigned")
        assert {delivery.lane for delivery in member.inbox} <= assigned
