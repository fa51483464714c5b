"""What settling promises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import Unsupported
from holdfast.ports import Settle
from holdfast.testing.waiting import wait_until

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage

_DELAY = 0.4
_CLOCKS_DIFFER = 0.02


class SettlingPromises:
    """Settled messages stay settled, and others come again."""

    def test_an_accepted_message_is_not_handed_out_again(self, stage: ConformanceStage) -> None:
        """Closing makes accepts durable without a flush."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        member.accept(*member.take(3))
        assert stage.leftovers(topic) == []

    def test_messages_may_be_accepted_in_any_order(self, stage: ConformanceStage) -> None:
        """The last one first is as good as the first one first."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c", b"d")
        for delivery in reversed(member.take(4)):
            member.accept(delivery)
        assert stage.leftovers(topic) == []

    def test_a_later_accept_never_covers_an_unfinished_message(
        self, stage: ConformanceStage
    ) -> None:
        """The unfinished one comes again; others only where the broker settles cumulatively."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        unfinished, *later = member.take(3)
        member.accept(*later)
        member.source.flush()
        again = stage.leftovers(topic)
        assert unfinished.body in again
        if stage.caps.settle is Settle.INDIVIDUAL:
            assert again == [unfinished.body]

    def test_a_settled_message_stays_settled_whatever_follows(
        self, stage: ConformanceStage
    ) -> None:
        """Accepting again is harmless; so is releasing or rejecting what was accepted."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        first, second, third = member.take(3)
        member.accept(first, second, third)
        member.accept(first)
        member.source.release(second, blame=True)
        member.source.reject(third)
        assert not member.idle(stage.hooks.quiet)
        assert stage.leftovers(topic) == []

    def test_accepting_nothing_is_harmless(self, stage: ConformanceStage) -> None:
        """An empty accept and a flush without accepts settle nothing."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        member.take(1)
        member.accept()
        member.source.flush()
        assert stage.leftovers(topic) == [b"a"]

    @pytest.mark.parametrize("blame", [True, False], ids=["blamed", "blameless"])
    def test_a_released_message_is_handed_out_again(
        self, stage: ConformanceStage, blame: bool
    ) -> None:
        """A release puts the message back at once, and the next accept settles it."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [first] = member.take(1)
        member.source.release(first, blame=blame)
        [again] = member.take(1)
        assert again.body == first.body
        member.accept(again)
        assert stage.leftovers(topic) == []

    def test_a_release_leaves_other_messages_alone(self, stage: ConformanceStage) -> None:
        """Only the released one comes again."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        first, second, third = member.take(3)
        member.source.release(second, blame=False)
        [again] = member.take(1)
        assert again.body == second.body
        member.accept(first, again, third)
        assert stage.leftovers(topic) == []

    def test_a_delayed_release_waits_at_least_its_delay(self, stage: ConformanceStage) -> None:
        """Where `delay` is not declared the release is refused, and the message stays ours."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        if stage.caps.delay is None:
            with pytest.raises(Unsupported):
                member.source.release(delivery, blame=False, delay=_DELAY)
        else:
            released = stage.clock.monotonic()
            member.source.release(delivery, blame=False, delay=_DELAY)
            [delivery] = member.take(1)
            assert stage.clock.monotonic() - released >= _DELAY - _CLOCKS_DIFFER
        member.accept(delivery)
        assert stage.leftovers(topic) == []

    def test_a_delay_beyond_the_longest_is_refused(self, stage: ConformanceStage) -> None:
        """No delay is cut short silently; with no longest one, a day is a day."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        [delivery] = member.take(1)
        longest = 0.0 if stage.caps.delay is None else stage.caps.delay
        if math.isinf(longest):
            member.source.release(delivery, blame=False, delay=86_400.0)
            assert not member.idle(stage.hooks.quiet)
        else:
            with pytest.raises(Unsupported):
                member.source.release(delivery, blame=False, delay=longest + 1)
            member.accept(delivery)
            assert stage.leftovers(topic) == []

    def test_a_rejected_message_is_never_handed_out_again(self, stage: ConformanceStage) -> None:
        """Reject is terminal, and holds nothing else back."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c")
        first, second, third = member.take(3)
        member.source.reject(second)
        assert not member.idle(stage.hooks.quiet)
        member.accept(first, third)
        assert stage.leftovers(topic) == []

    def test_a_rejected_message_is_where_native_dlq_says(self, stage: ConformanceStage) -> None:
        """Declared, it is in the broker's dead-letter place; other groups still get it."""
        topic = stage.topic(partitions=1)
        other = stage.another_group(topic)
        member = stage.member(topic)
        stage.publish(topic, b"a")
        member.source.reject(member.take(1)[0])
        member.source.flush()
        if stage.caps.native_dlq:
            wait_until(
                lambda: stage.hooks.dead_letters(stage.broker, topic, stage.group) == [b"a"],
                deadline=stage.hooks.settle_in,
                what="the rejected message is in the dead-letter place",
            )
        assert stage.member(topic, group=other).take(1)[0].body == b"a"
