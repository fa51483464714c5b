"""What happens to those who settle too late."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, StaleDelivery
from holdfast.testing.conformance.hooks import waits_for_expiry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.ports import Delivery, Source
    from holdfast.testing.conformance.stage import ConformanceStage


class StalenessPromises:
    """Who lost a message cannot settle it, whatever they believe."""

    def test_settling_after_close_changes_nothing(self, stage: ConformanceStage) -> None:
        """The next member keeps what the closed one tries to settle."""
        topic = stage.topic(partitions=1)
        first = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        old = first.take(3)
        first.close()
        second = stage.member(topic)
        second.take(3)
        _settle_late(first.source, old, HoldfastError)
        assert not second.idle(stage.hooks.quiet)
        assert sorted(stage.leftovers(topic), key=str) == [b"a", b"b", b"c"]

    def test_settling_after_the_lane_moved_changes_nothing(self, stage: ConformanceStage) -> None:
        """The new owner keeps its messages; without lanes of one owner none ever moves."""
        topic = stage.topic()
        first = stage.member(topic)
        bodies = {b"%d" % n for n in range(16)}
        stage.publish(topic, *bodies)
        held = first.take(16)
        second = stage.member(topic)
        stage.share(topic, first, second)
        if not stage.exclusive:
            assert not second.idle(stage.hooks.quiet)
            first.accept(*held)
            assert stage.leftovers(topic) == []
            return
        moved = second.source.assignment()
        old = [delivery for delivery in held if delivery.lane in moved]
        expected = {delivery.body for delivery in old}
        stage.until(lambda: expected <= set(second.bodies), first, second, what="moved work comes")
        _settle_late(first.source, old, StaleDelivery)
        first.source.flush()
        count = len(second.inbox)
        second.idle(stage.hooks.quiet)  # another lane may move meanwhile, and bring its own
        again = [body for body in second.bodies[count:] if body in expected]
        assert again == [], "a late release handed a message out twice"
        assert expected <= set(stage.leftovers(topic))

    @waits_for_expiry
    def test_a_silent_member_settles_too_late(self, stage: ConformanceStage) -> None:
        """Who stops polling loses its messages, and settling them later changes nothing."""
        topic = stage.topic(partitions=1)
        first = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        old = first.take(3)
        second = stage.member(topic)
        if first.source.caps.lease is None and stage.hooks.session is None:
            assert not second.idle(stage.hooks.quiet)
            first.accept(*old)
            assert stage.leftovers(topic) == []
            return
        second.take(3)
        _settle_late(first.source, old, HoldfastError)
        assert sorted(stage.leftovers(topic), key=str) == [b"a", b"b", b"c"]


def _settle_late(source: Source, old: Sequence[Delivery], allowed: type[HoldfastError]) -> None:
    """Try to settle *old* in each way in turn; an error may say that it is too late."""
    for number, delivery in enumerate(old):
        with suppress(allowed):
            match number % 3:
                case 0:
                    source.accept([delivery])
                case 1:
                    source.reject(delivery)
                case _:
                    source.release(delivery, blame=True)
