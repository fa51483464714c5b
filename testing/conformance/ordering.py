"""What order holds, and through what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.message import Message
from holdfast.ports import Ordering
from holdfast.testing.observed import check_nothing_lost, check_order_per_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.ports import Delivery
    from holdfast.testing.conformance.recording import RecordedMember
    from holdfast.testing.conformance.stage import ConformanceStage


class OrderingPromises:
    """Messages come in the declared order."""

    def test_a_key_comes_in_the_order_published(self, stage: ConformanceStage) -> None:
        """Each key's messages come as they went in, over several batches."""
        topic = stage.topic()
        member = stage.member(topic)
        sent = _rounds(stage, topic, keys=5, rounds=4)
        member.work(len(sent), limit=3)
        _check(stage, sent, member.inbox)

    def test_a_lane_comes_in_the_order_published(self, stage: ConformanceStage) -> None:
        """With PARTITION a key stays in its lane, and a lane's messages come as they went in."""
        topic = stage.topic()
        member = stage.member(topic)
        sent = _rounds(stage, topic, keys=8, rounds=3)
        member.work(len(sent), limit=5)
        _check(stage, sent, member.inbox)
        if stage.caps.ordering is not Ordering.PARTITION:
            return
        lanes = {delivery.key: delivery.lane for delivery in member.inbox}
        assert all(delivery.lane == lanes[delivery.key] for delivery in member.inbox)
        check_order_per_key(
            [(lanes[message.key], message.payload) for message in sent],
            [(delivery.lane, delivery.body) for delivery in member.inbox],
        )

    def test_order_per_key_holds_while_members_come_and_go(self, stage: ConformanceStage) -> None:
        """Neither a joining nor a leaving member lets a later message overtake."""
        topic = stage.topic()
        handled: list[Delivery] = []

        def work_until(
            condition: Callable[[], object], *members: RecordedMember, what: str
        ) -> None:
            def is_reached() -> bool:
                for member in members:
                    for delivery in member.poll(limit=2):
                        handled.append(delivery)
                        member.accept(delivery)
                return bool(condition())

            stage.until(is_reached, what=what)

        sent = _rounds(stage, topic, keys=6, rounds=2)
        first = stage.member(topic)
        work_until(lambda: len(handled) > 2, first, what="the first member works")
        second, third = stage.member(topic), stage.member(topic)
        sent += _rounds(stage, topic, keys=6, rounds=2, start=2)
        work_until(
            lambda: second.source.assignment() and third.source.assignment(),
            *(first, second, third),
            what="all three have lanes",
        )
        first.close()
        sent += _rounds(stage, topic, keys=6, rounds=1, start=4)
        every = {message.payload for message in sent}
        work_until(
            lambda: every <= {delivery.body for delivery in handled},
            *(second, third),
            what="everything is handled",
        )
        _check(stage, sent, handled)
        if stage.exclusive:
            stage.chronicle.check_one_owner()

    def test_a_released_message_is_overtaken_only_as_declared(
        self, stage: ConformanceStage
    ) -> None:
        """With `release_keeps_order` later messages of the key wait behind it."""
        topic = stage.topic()
        member = stage.member(topic)
        bodies = [b"%d" % n for n in range(5)]
        stage.publish(topic, *bodies, key=b"k")
        settled: list[bytes | None] = []
        released: set[bytes | None] = set()
        while len(settled) < len(bodies):
            for delivery in member.take(1):
                if delivery.body in released or len(released) > 2:
                    member.accept(delivery)
                    settled.append(delivery.body)
                else:
                    released.add(delivery.body)
                    member.source.release(delivery, blame=True)
        check_nothing_lost(bodies, settled)
        if stage.caps.release_keeps_order:
            assert settled == bodies

    def test_a_delayed_release_is_overtaken_only_as_declared(self, stage: ConformanceStage) -> None:
        """While it waits, other keys go on; its own key waits with `release_keeps_order`."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a1", key=b"a")
        [delivery] = member.take(1)
        if stage.caps.delay is None:
            member.source.release(delivery, blame=False)
        else:
            member.source.release(delivery, blame=False, delay=min(stage.caps.delay, 0.5))
        stage.publish(topic, b"a2", key=b"a")
        stage.publish(topic, b"b1", key=b"b")
        settled: list[bytes | None] = []
        while len(settled) < 3:
            for delivery in member.take(1):
                member.accept(delivery)
                settled.append(delivery.body)
        check_nothing_lost([b"a1", b"a2", b"b1"], settled)
        if stage.caps.release_keeps_order:
            assert settled.index(b"a1") < settled.index(b"a2")


def _rounds(
    stage: ConformanceStage, topic: str, *, keys: int, rounds: int, start: int = 0
) -> list[Message]:
    """Publish one message per key in each round, a batch per round."""
    sent: list[Message] = []
    for number in range(start, start + rounds):
        batch = [
            Message.new(topic, b"%d of %d" % (number, key), key=b"key %d" % key)
            for key in range(keys)
        ]
        stage.send(*batch)
        sent += batch
    return sent


def _check(stage: ConformanceStage, sent: Sequence[Message], handled: Sequence[Delivery]) -> None:
    check_nothing_lost([m.payload for m in sent], [d.body for d in handled])
    if stage.caps.ordering is not Ordering.NONE:
        check_order_per_key([(m.key, m.payload) for m in sent], [(d.key, d.body) for d in handled])
