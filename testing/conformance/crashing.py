"""What survives the death of a member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ports import Settle
from holdfast.testing.conformance.counting import expected_count
from holdfast.testing.conformance.dying import die_in_action, victim
from holdfast.testing.conformance.hooks import waits_for_expiry
from holdfast.testing.member import Life, Moment

if TYPE_CHECKING:
    from holdfast.testing.conformance.stage import ConformanceStage


class CrashingPromises:
    """A killed member's messages are handled at least once, and its accepts hold."""

    @waits_for_expiry
    def test_a_member_killed_on_receipt_loses_nothing(self, stage: ConformanceStage) -> None:
        """What it had received and not handled comes again, and counts as declared."""
        _check_death_at("received", stage)

    @waits_for_expiry
    def test_a_member_killed_before_it_accepts_loses_nothing(self, stage: ConformanceStage) -> None:
        """What it had handled and not accepted comes again: at least once is not once."""
        _check_death_at("handled", stage)

    @waits_for_expiry
    def test_a_flushed_accept_survives_its_member(self, stage: ConformanceStage) -> None:
        """What it had accepted and flushed does not come again; the rest does."""
        _check_death_at("accepted", stage)

    @waits_for_expiry
    def test_a_death_after_later_accepts_brings_back_the_unfinished(
        self, stage: ConformanceStage
    ) -> None:
        """The flushed accept of a later message never covers an earlier one."""
        topic = stage.topic(partitions=1)
        stage.publish(topic, b"a", b"b", b"c")
        log = die_in_action(stage, topic, Life(moment="accepted", nth=3, unaccepted=frozenset({1})))
        unfinished, *later = log.bodies("handled")
        assert log.bodies("accepted") == later
        survivor = stage.member(topic)
        stage.until(lambda: unfinished in survivor.bodies, survivor, what="the unfinished comes")
        if stage.caps.settle is Settle.INDIVIDUAL:
            assert survivor.bodies == [unfinished]
        survivor.accept(*survivor.inbox)
        again = stage.leftovers(topic)
        assert unfinished not in again
        assert stage.caps.settle is Settle.CUMULATIVE or again == []

    @waits_for_expiry
    def test_a_living_member_takes_over_from_a_killed_one(self, stage: ConformanceStage) -> None:
        """The survivor gets the lanes and the messages of the one that died."""
        topic = stage.topic()
        survivor, dying = stage.member(topic), victim(stage, topic)
        bodies = {b"%d" % n for n in range(24)}

        def have_joined() -> bool:
            dying.poll()
            survivor.poll()
            return bool(dying.has_joined() and survivor.source.assignment())

        def have_messages() -> bool:
            dying.poll()
            if stage.exclusive:  # else the survivor might take everything
                survivor.accept(*survivor.poll(limit=1))
            return bool(dying.held() and (survivor.inbox or not stage.exclusive))

        try:
            stage.until(have_joined, what="both have joined")
            stage.publish(topic, *bodies)
            stage.until(have_messages, what="both have messages")
        finally:
            dying.kill()

        def all_came() -> bool:
            survivor.accept(*survivor.poll())
            return bodies <= set(survivor.bodies)

        stage.until(all_came, what="the survivor gets everything")
        assert stage.leftovers(topic) == []


def _check_death_at(moment: Moment, stage: ConformanceStage) -> None:
    """Let a member die with its third of six messages, and see what comes again."""
    topic = stage.topic(partitions=1)
    bodies = {b"%d" % n for n in range(6)}
    stage.publish(topic, *sorted(bodies))
    log = die_in_action(stage, topic, Life(moment=moment, nth=3))
    assert len(log.bodies(moment)) == 3
    accepted = set(log.bodies("accepted"))
    survivor = stage.member(topic)
    again = survivor.take(len(bodies - accepted))
    assert {delivery.body for delivery in again} == bodies - accepted
    if moment == "received":
        [held] = [d for d in again if d.body == log.bodies(moment)[-1]]
        assert held.count == expected_count(stage.caps, failures=1, deliveries=2)
    survivor.accept(*again)
    assert stage.leftovers(topic) == []
