"""What polling promises."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK
from holdfast.testing.waiting import wait_until

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage


class DeliveryPromises:
    """Every group gets every message, as fast as it asks."""

    def test_what_is_published_is_handed_out_once(self, stage: ConformanceStage) -> None:
        """A member gets all messages, and each one once while it holds them."""
        topic = stage.topic()
        member = stage.member(topic)
        bodies = [b"%d" % n for n in range(12)]
        stage.publish(topic, *bodies)
        member.take(12)
        assert not member.idle(stage.hooks.quiet)
        assert sorted(member.bodies, key=str) == sorted(bodies, key=str)

    def test_an_empty_poll_returns_nothing_in_time(self, stage: ConformanceStage) -> None:
        """Waiting for messages ends when the timeout does."""
        member = stage.member(stage.topic())
        stage.until(member.source.assignment, member, what="lanes are assigned")
        started = SYSTEM_CLOCK.monotonic()
        assert member.poll(timeout=0.2) == []
        assert SYSTEM_CLOCK.monotonic() - started < 0.2 + stage.hooks.settle_in / 4

    def test_a_poll_returns_at_most_what_it_was_asked_for(self, stage: ConformanceStage) -> None:
        """What is beyond the limit comes with the next polls."""
        topic = stage.topic()
        member = stage.member(topic)
        bodies = {b"%d" % n for n in range(10)}
        stage.publish(topic, *bodies)
        member.work(len(bodies), limit=2)  # the kit's member checks the limit
        assert set(member.bodies) == bodies

    def test_wake_ends_a_waiting_poll(self, stage: ConformanceStage) -> None:
        """Another thread can make a poll return long before its timeout."""
        member = stage.member(stage.topic())
        stage.until(member.source.assignment, member, what="lanes are assigned")
        returned = threading.Event()

        def wait() -> None:
            member.poll(timeout=20 * stage.hooks.settle_in)
            returned.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()

        def is_back() -> bool:
            member.source.wake()  # again and again: the first may come before the poll waits
            return returned.wait(0.05)

        wait_until(is_back, deadline=stage.hooks.settle_in, what="the woken poll returns")
        thread.join()

    def test_one_source_reads_several_topics(self, stage: ConformanceStage) -> None:
        """Messages of all topics come, each from a lane of its own topic."""
        topics = [stage.topic(partitions=1), stage.topic(partitions=1)]
        member = stage.member(*topics)
        for topic in topics:
            stage.publish(topic, topic.encode())
        came = member.take(2)
        assert {d.lane.topic: d.body for d in came} == {t: t.encode() for t in topics}

    def test_each_group_gets_everything(self, stage: ConformanceStage) -> None:
        """What one group settles, another one still gets."""
        topic = stage.topic()
        other = stage.another_group(topic)
        bodies = {b"%d" % n for n in range(6)}
        stage.publish(topic, *bodies)
        for group in (stage.group, other):
            member = stage.member(topic, group=group)
            member.accept(*member.take(6))
            member.close()
            assert set(member.bodies) == bodies

    def test_a_group_gets_what_was_published_while_it_had_no_member(
        self, stage: ConformanceStage
    ) -> None:
        """From the beginning, or without `late_groups` from when it was created."""
        topic = stage.topic()
        if stage.caps.late_groups:
            stage.publish(topic, b"before")
            group = stage.another_group(topic)
        else:
            group = stage.another_group(topic)
            stage.publish(topic, b"before")
        member = stage.member(topic, group=group)
        stage.publish(topic, b"after")
        assert {d.body for d in member.take(2)} == {b"before", b"after"}

    def test_lag_counts_what_is_not_settled(self, stage: ConformanceStage) -> None:
        """Messages count until they are accepted or rejected, whether handed out or not."""
        topic = stage.topic(partitions=1)
        member = stage.member(topic)
        stage.publish(topic, b"a", b"b", b"c", b"d")
        first, second, _ = member.take(3)
        _wait_for_lag(4, stage, topic)
        member.accept(first)
        member.source.reject(second)
        member.source.flush()
        _wait_for_lag(2, stage, topic)
        stage.until(
            lambda: sum(member.source.lag().values()) == 2,
            member,
            what="the source reports a lag of 2",
        )


def _wait_for_lag(count: int, stage: ConformanceStage, topic: str) -> None:
    def is_right() -> bool:
        lag = stage.broker.lag(stage.group, [topic])
        assert sum(lag.values()) == count, lag
        return True

    wait_until(is_right, deadline=stage.hooks.settle_in, what=f"the lag is {count}")
