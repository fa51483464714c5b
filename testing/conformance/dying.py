"""Members that die: in a process of their own, or abandoned within this one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Protocol

from holdfast.testing.faults import Crash
from holdfast.testing.member import Life, Log, live

if TYPE_CHECKING:
    from holdfast.testing.conformance.recording import RecordedMember
    from holdfast.testing.conformance.stage import ConformanceStage


class Victim(Protocol):
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


def die_in_action(stage: ConformanceStage, topic: str, life: Life) -> Log:
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


def victim(stage: ConformanceStage, topic: str) -> Victim:
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
