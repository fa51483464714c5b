"""What goes wrong in a run of the chain, and when: drawn from a seed, then carried out."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.chain.crew import Crew
    from tests.servers import Server

Kind = Literal["kill", "freeze", "thaw", "crash", "restart", "outage", "recovery"]
EVERY = 3.0
"""Seconds from one kill or freeze to the next."""
FROZEN = 7.0
"""Seconds: longer than any lease or session of the chain."""
OUTAGE = 8.0
"""Seconds: long enough for a killed consumer to be back while its topics are paused."""


@dataclass(frozen=True, slots=True, order=True)
class Act:
    """One fault: *at* so many seconds after the beginning, *whom* it hits."""

    at: float
    kind: Kind
    whom: str


def drawn(
    seconds: float, members: Sequence[str], servers: Sequence[str], *, seed: int, rounds: int = 1
) -> list[Act]:
    """Return the faults of a run in their order.

    Every three seconds a process is killed or, one time in three, frozen, everybody in turn;
    every server goes down *rounds* times, by a crash or in good order, and so does what the
    handlers depend on: then one of each group of consumers dies, and joins again while its topics
    are paused. All of it is over after *seconds*.
    """
    chance = random.Random(seed)
    acts: list[Act] = []
    turn: list[str] = []
    for n in range(1, int(seconds / EVERY)):
        turn = turn or chance.sample(members, len(members))
        whom, at = turn.pop(), n * EVERY
        if n % 3 == 2 and at + FROZEN < seconds:
            acts += [Act(at, "freeze", whom), Act(at + FROZEN, "thaw", whom)]
        else:
            acts.append(Act(at, "kill", whom))
    falls = [server for _ in range(rounds) for server in servers]
    for n, server in enumerate(falls, start=1):
        kind: Kind = "crash" if chance.random() < 0.5 else "restart"
        acts.append(Act(seconds * n / (len(falls) + 1), kind, server))
    for n in range(rounds):
        away = seconds * n / rounds + 1
        acts += [Act(away, "outage", "gateway"), Act(away + OUTAGE, "recovery", "gateway")]
        acts += [Act(away + 2, "kill", chance.choice(own)) for own in groups(members) if own]
    return sorted(acts)


def groups(members: Sequence[str]) -> list[list[str]]:
    """Return the members of each consumer group."""
    return [[one for one in members if one.startswith(group)] for group in ("billing", "shipping")]


class Strain:
    """Carries out faults on the processes and the servers of a run."""

    def __init__(self, crew: Crew, servers: Mapping[str, Server], gateway_is_down: Path) -> None:
        self.restarts = 0
        self._crew = crew
        self._servers = servers
        self._down = gateway_is_down
        self._falling: list[threading.Thread] = []
        self._turns = {name: threading.Lock() for name in servers}
        """A server falls again when it is up: one that is slow to start is not killed at that."""
        self._failed: list[BaseException] = []

    def undergo(self, acts: Sequence[Act], note: Callable[[str], None]) -> None:
        """Return when the last of *acts* is over and everything is up again."""
        began = time.monotonic()
        for act in acts:
            while (left := began + act.at - time.monotonic()) > 0:
                self._crew.look()
                time.sleep(min(left, 0.2))  # pacing: the faults have a rhythm of their own
            note(f"{act.at:5.1f} s: {act.kind} {act.whom}")
            self._do(act)
        for name in self._crew.names:
            self._crew.thaw(name)
        for thread in self._falling:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _do(self, act: Act) -> None:
        match act.kind:
            case "kill":
                self._crew.kill(act.whom)
            case "freeze":
                self._crew.freeze(act.whom)
            case "thaw":
                self._crew.thaw(act.whom)
            case "outage":
                self._down.touch()
            case "recovery":
                self._down.unlink()
            case "crash" | "restart":
                thread = threading.Thread(target=self._fall, args=(act,))
                self._falling.append(thread)
                thread.start()

    def _fall(self, act: Act) -> None:
        """Take a server down and bring it back, while processes go on being killed."""
        server = self._servers[act.whom]
        try:
            with self._turns[act.whom]:
                if act.kind == "crash":
                    server.kill()
                else:
                    server.stop()
                server.start()
                self.restarts += 1
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            self._failed.append(error)
