"""What a lease promises, and what its absence does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import StaleDelivery, Unsupported
from holdfast.ports import Ordering
from holdfast.testing.conformance.hooks import waits_for_expiry
from holdfast.testing.conformance.recording import STEP, WaitDeadline

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage

_CLOCKS_DIFFER = 0.05


class LeasingPromises:
    """A delivery is its member's until it is settled, or until its lease runs out."""

    def test_lease_until_is_set_as_declared(self, stage: ConformanceStage) -> None:
        """With a lease the delivery knows its end by the monotonic clock; without one, none."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        lease, now = member.source.caps.lease, stage.clock.monotonic()
        if lease is None:
            assert delivery.lease_until is None
        else:
            assert delivery.lease_until is not None
            assert now - _CLOCKS_DIFFER < delivery.lease_until <= now + lease + _CLOCKS_DIFFER

    @waits_for_expiry
    def test_an_unsettled_message_comes_again_after_its_lease(
        self, stage: ConformanceStage
    ) -> None:
        """Not before, and not at all where there is no lease and its member polls on."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        if member.source.caps.lease is None:
            assert not member.idle(stage.hooks.quiet)
        else:
            assert delivery.lease_until is not None
            [again] = member.take(1)
            assert stage.clock.monotonic() >= delivery.lease_until - _CLOCKS_DIFFER
            assert again.body == delivery.body
            delivery = again
        member.accept(delivery)
        assert stage.leftovers(topic) == []

    @waits_for_expiry
    def test_what_follows_a_lost_message_of_its_key_goes_back_with_it(
        self, stage: ConformanceStage
    ) -> None:
        """A lease that runs out on one message never lets its successors overtake it.

        They are stale with it, however lately they were extended, and come again behind it;
        other keys keep theirs.
        """
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"lost", b"behind", key=b"k")
        stage.publish(topic, b"other", key=b"o")
        lost, behind, other = member.take(3)
        lease = member.source.caps.lease
        if lease is None or stage.caps.ordering is Ordering.NONE:
            member.accept(lost, behind, other)
        else:
            deadline = WaitDeadline(stage.hooks.settle_in + 2 * lease)
            while member.bodies.count(b"lost") < 2:
                deadline.check("the message comes again after its lease", member.bodies)
                member.source.extend(other, lease)
                with suppress(StaleDelivery):
                    member.source.extend(behind, lease)
                member.poll(timeout=min(STEP, lease / 8))
            with pytest.raises(StaleDelivery):
                member.source.extend(behind, lease)
            member.accept(behind)
            member.accept(other)
            assert [d.body for d in member.inbox[3:] if d.body != b"behind"] == [b"lost"]
            assert stage.leftovers(topic) == [b"lost", b"behind"]

    @waits_for_expiry
    def test_extend_keeps_a_message_beyond_its_lease(self, stage: ConformanceStage) -> None:
        """Extended in time it is not handed out again; without a lease `extend` is refused."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        lease = member.source.caps.lease
        if lease is None:
            with pytest.raises(Unsupported):
                member.source.extend(delivery, 1.0)
        else:
            until = stage.clock.monotonic() + 1.5 * lease
            while stage.clock.monotonic() < until:
                member.source.extend(delivery, lease)
                assert not member.idle(lease / 4), "handed out again although extended"
        member.accept(delivery)
        assert stage.leftovers(topic) == []

    def test_what_is_settled_cannot_be_extended(self, stage: ConformanceStage) -> None:
        """`StaleDelivery` says that the message is ours no more."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        member.accept(delivery)
        member.source.flush()
        expected = Unsupported if member.source.caps.lease is None else StaleDelivery
        with pytest.raises(expected):
            member.source.extend(delivery, 1.0)
