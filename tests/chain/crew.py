"""The processes of the chain: started, killed, frozen, started again, asked for their threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.testing import wait_until
from tests.signals import wait_until_heard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS = Path(__file__).parent / "programs"
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
_TAIL = 25


@dataclass(slots=True)
class Member:
    """One place in the chain, filled again whenever its process is killed."""

    name: str
    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    is_frozen: bool = False


class Crew:
    """Every process of one run, with a log each in *folder*."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.ended: list[str] = []
        """Who ended though nobody ended them, or not as they should."""
        self.kills = 0
        self.freezes = 0
        self._folder = folder
        self._env = {**os.environ, "PYTHONPATH": str(PROGRAMS), **environment}
        self._members: dict[str, Member] = {}

    def start(self, name: str, *argv: str) -> None:
        """Start a process by the *name*."""
        self._members[name] = Member(name, argv, self._launch(name, argv))

    def run(self, *argv: str, within: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run `holdfast` with *argv* to its end, as an operator does."""
        return subprocess.run(
            [HOLDFAST, *argv], cwd=PROGRAMS, env=self._env, timeout=within,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def names(self) -> list[str]:
        """Who runs, or should."""
        return list(self._members)

    def memory(self) -> dict[str, int]:
        """Return the resident kB of each process that runs."""
        return {member.name: _resident(member.process.pid) for member in self._members.values()}

    def look(self) -> None:
        """Start again whoever ended by itself, and note it: an outage is waited for."""
        for member in self._members.values():
            if (code := member.process.poll()) is not None:
                self.ended.append(f"{member.name} ended with {code}")
                self._fill(member)

    def kill(self, name: str) -> None:
        """Kill a process hard, as the lack of memory does, and start another in its place."""
        member = self._members[name]
        if member.process.poll() is not None:
            return
        member.process.kill()
        member.process.wait()
        self.kills += 1
        self._fill(member)

    def lose(self, name: str) -> None:
        """Kill a process hard; nobody comes in its place."""
        member = self._members.pop(name)
        member.process.kill()
        member.process.wait()
        self.kills += 1

    def freeze(self, name: str) -> None:
        """Stop a process in its tracks; its connections stay open."""
        member = self._members[name]
        member.process.send_signal(signal.SIGSTOP)
        member.is_frozen = True
        self.freezes += 1

    def thaw(self, name: str) -> None:
        """Let a frozen process go on, as if no time had passed."""
        member = self._members[name]
        if member.is_frozen:
            member.process.send_signal(signal.SIGCONT)
            member.is_frozen = False

    def end(self, *names: str, within: float = 120.0) -> None:
        """Ask for a clean stop of *names*; how each of them ends is noted unless it is well."""
        members = [self._members.pop(name) for name in names]
        for member in members:
            wait_until_heard(member.process)  # it may have been started a moment ago
            member.process.terminate()
        until = time.monotonic() + within
        for member in members:
            try:
                code: object = member.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = "nothing: it had to be killed"
                self._dump(member)
                member.process.kill()
                member.process.wait()
            if code != 0:
                self.ended.append(f"{member.name} ended, when asked to, with {code}")

    def close(self) -> None:
        """Leave no process behind."""
        for member in self._members.values():
            member.process.kill()
            member.process.wait()
        self._members.clear()

    def told(self) -> str:
        """Return the ends of all logs, with the stacks of every thread that runs now."""
        for member in self._members.values():
            self._dump(member)
        return "\n".join(
            f"--- {log.name}\n{_tail(log)}" for log in sorted(self._folder.glob("*.log"))
        )

    def _dump(self, member: Member) -> None:
        """Let the process write its threads' stacks to its log."""
        log = self._log(member.name)
        size = log.stat().st_size
        if member.process.poll() is None:
            member.process.send_signal(signal.SIGUSR1)
            try:
                wait_until(lambda: log.stat().st_size > size, deadline=2, what="a dump")
            except AssertionError:
                return
            time.sleep(0.2)  # pacing: the dump is written in pieces

    def _fill(self, member: Member) -> None:
        member.is_frozen = False
        member.process = self._launch(member.name, member.argv)

    def _launch(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                argv, cwd=PROGRAMS, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def _tail(log: Path) -> str:
    """Return the last lines before the stacks, and the stacks."""
    lines = log.read_text(errors="replace").splitlines()
    stacks = [n for n, line in enumerate(lines) if line.startswith(("Thread 0x", "Current thread"))]
    first = stacks[0] if stacks else len(lines)
    return "\n".join(lines[max(0, first - _TAIL) :])
