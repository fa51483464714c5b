"""What survives the death of a member."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Protocol

from holdfast.ports import Settle
from holdfast.testing.conformance.counting import expected_count
from holdfast.testing.conformance.hooks import waits_for_expiry
from holdfast.testing.faults import Crash
from holdfast.testing.member import Life, Log, Moment, live

if TYPE_CHECKING:
    from holdfast.testing.conformance.recording import RecordedMember
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
        log = _run_to_death(stage, topic, Life(moment="accepted", nth=3, unaccepted=frozenset({1})))
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
        survivor, dying = stage.member(topic), _victim(stage, topic)
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
    log = _run_to_death(stage, topic, Life(moment=moment, nth=3))
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


class _Victim(Protocol):
    """A member that will be killed."""

    def poll(self) -> object:
        """Let it work, if it does not do so by itself."""
        ...

    def has_joined(self) -> bool:
        """Whether it has lanes."""
        ...

    def held(self) -> list[bytes]:
        """Return the bodies that it was handed."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


def _run_to_death(stage: ConformanceStage, topic: str, life: Life) -> Log:
    """Run a member to its end as *life* has it, and return what it noted."""
    log = Log(stage.folder / f"{topic}.log")
    if stage.url is None:
        _die_here(stage, topic, life, log)
    else:
        child = _start(stage, topic, life)
        try:
            _, errors = child.communicate(timeout=3 * stage.hooks.settle_in)
        finally:
            child.kill()
        assert child.returncode == -signal.SIGKILL, errors.decode()
    return log


def _victim(stage: ConformanceStage, topic: str) -> _Victim:
    """Return a member that holds what it gets until it is killed."""
    if stage.url is None:
        return _Abandoned(stage, stage.member(topic))
    return _Killed(stage, topic)


def _die_here(stage: ConformanceStage, topic: str, life: Life, log: Log) -> None:
    member = stage.member(topic)

    def die() -> NoReturn:
        stage.abandon(member)
        raise Crash("the member is abandoned")

    with suppress(Crash):
        live(member.source, life, log.note, die)


def _start(stage: ConformanceStage, topic: str, life: Life) -> subprocess.Popen[bytes]:
    assert stage.url is not None
    options = ["--settings", json.dumps(dict(stage.hooks.source_settings))]
    if life.moment is not None:
        options += ["--moment", life.moment, "--nth", str(life.nth)]
        options += ["--unaccepted", *map(str, sorted(life.unaccepted))]
    command = [sys.executable, "-m", "holdfast.testing.member", stage.url, topic, stage.group]
    return subprocess.Popen(  # noqa: S603 - our own program
        [*command, str(stage.folder / f"{topic}.log"), *options], stderr=subprocess.PIPE
    )


class _Killed:
    """A process of its own, which polls by itself."""

    def __init__(self, stage: ConformanceStage, topic: str) -> None:
        self._child = _start(stage, topic, Life())
        self._log = Log(stage.folder / f"{topic}.log")

    def poll(self) -> None:
        if self._child.poll() is not None:
            _, errors = self._child.communicate()
            raise AssertionError(f"the member ended by itself: {errors.decode()}")

    def has_joined(self) -> bool:
        return bool(self._log.bodies("joined"))

    def held(self) -> list[bytes]:
        return self._log.bodies("received")

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


class _Abandoned:
    """A member of this process, which is abandoned."""

    def __init__(self, stage: ConformanceStage, member: RecordedMember) -> None:
        self._stage = stage
        self._member = member

    def poll(self) -> None:
        self._member.poll()

    def has_joined(self) -> bool:
        return bool(self._member.source.assignment())

    def held(self) -> list[bytes]:
        return [body for body in self._member.bodies if body is not None]

    def kill(self) -> None:
        self._stage.abandon(self._member)
