"""May a message run? Decided here alone, without I/O, whoever drives the attempt.

turn              whose turn it is in its key: whether it runs now, later, apart or in a batch
may_be_tested     whether one that may have ended a process runs beside what runs now
may_share_batch   whether it may run in one transaction with others
asks_circuits     whether it is the circuits of its handler that let it in
permits           how many may try a circuit that is not closed
eligibility       whether one that a thread has taken may be handled, parked, or never again
replay_ending     how a replay ends that is not to be handled here
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.circuit import Closed, HalfOpen, Open
from holdfast.consumer.scheduling.work import NEW, HandlerEnding
from holdfast.dlq.replay.admission import ReplayStanding
from holdfast.errors import Remedy

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.circuit import CircuitPolicy
    from holdfast.circuit.state import State
    from holdfast.consumer.scheduling.work import Work

_REPLAY_ENDINGS = {
    ReplayStanding.HELD: HandlerEnding.HELD_BACK,
    ReplayStanding.DONE: HandlerEnding.DUPLICATE,
    ReplayStanding.OVER: HandlerEnding.WITHDRAWN,
}


class ProcessKilled(Exception):
    """A message was alone in hand each time that its process died, or its handler ended it."""

    __holdfast_remedy__ = Remedy.DEAD_LETTER

    def __init__(self, crashes: int) -> None:
        super().__init__(
            f"the process died {crashes} times while it handled this message and nothing else: "
            "out of memory, a crash in native code, a kill, or a handler that raises SystemExit"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """It may."""

    alone: bool = False
    """Whether its start is marked by itself: it may have ended a process."""


@dataclass(frozen=True, slots=True)
class Park:
    """It must not overtake an earlier message of its key: it waits behind it."""


@dataclass(frozen=True, slots=True)
class Bury:
    """No handler may see it any more: it becomes a dead letter because of *error*."""

    error: Exception


Eligibility = Run | Park | Bury

RUN, _RUN_ALONE, _PARK = Run(), Run(alone=True), Park()


class Turn(Enum):
    """What the first message in hand of a key does now."""

    NOT_YET = "not yet"
    """It is not admitted, or the consumer stops."""
    LATER = "later"
    """Its retry is not due."""
    TESTED = "tested"
    """It may have ended a process: it runs apart, once nothing else does."""
    AFTER_TESTS = "after tests"
    """Others that may have ended a process run now."""
    BATCHED = "batched"
    """It waits for company."""
    NOW = "now"
    """It runs, if its circuits let it in."""


# Bound once: Python looks a member up in its class slowly, and each message asks.
_NOT_YET, _LATER, _TESTED = Turn.NOT_YET, Turn.LATER, Turn.TESTED
_AFTER_TESTS, _BATCHED, _NOW = Turn.AFTER_TESTS, Turn.BATCHED, Turn.NOW


def turn(work: Work, *, key_held: bool, now: float, testing: bool) -> Turn:
    """Return what *work*, the first of its key, does *now*; *testing*: suspects run or wait to.

    One whose key is held runs no handler: it is only parked, which ends no process.
    """
    if not work.is_admitted:
        return _NOT_YET
    if work.not_before > now:
        return _LATER
    if work.history.crash_suspect and not key_held:
        return _TESTED
    if testing:
        return _AFTER_TESTS
    if work.route.batch is not None and not key_held and may_share_batch(work):
        return _BATCHED
    return _NOW


def may_be_tested(suspect: Work, *, others: int, tested: Collection[Work], company: int) -> bool:
    """Whether *suspect* may run beside *others* and the suspects that are *tested* now.

    Suspects run beside suspects alone, at most *company* of them, a prime one beside nothing.
    """
    if others:
        return False
    if suspect.history.run_alone:
        return not tested
    return len(tested) < company and not any(one.history.run_alone for one in tested)


def may_share_batch(work: Work) -> bool:
    """Whether *work* may run in one transaction with others: nothing about it is unusual."""
    history, message = work.history, work.message
    return not (
        (history is not NEW and (history.failed_in_batch or history.crash_suspect))
        or work.is_revoked
        or work.row is not None
        or work.run.later is not None
        or work.refused is not None
        or ((message.replayed or message.headers.pairs) and message.is_replay)
    )


def asks_circuits(work: Work, *, key_held: bool) -> bool:
    """Whether the circuits let *work* in; not one that is only parked, or goes on after a wait."""
    return not key_held and work.run.later is None


def permits(state: State, policy: CircuitPolicy, now: float) -> float:
    """Return how many messages may try a circuit in *state* at a time; no end while it is closed.

    Open: none until its time has come. Half-open: as many as have not reported.
    """
    match state:
        case Closed():
            return math.inf
        case Open(until=until) if until is None or now < until:
            return 0
        case HalfOpen(probes=probes) if not _is_overdue(state, now):
            return policy.permits - probes.count(now).calls
    return policy.permits


def coming_generation(state: State, now: float) -> int:
    """Return the generation of *state* in which one that is let in now will make its call."""
    is_old = isinstance(state, Open) or (isinstance(state, HalfOpen) and _is_overdue(state, now))
    return state.generation + is_old


def _is_overdue(state: HalfOpen, now: float) -> bool:
    """Whether the missing probes count as failed: the next one who asks is told what follows."""
    return state.permits <= 0 and now >= state.until


def takes_permit(work: Work, *, tries: bool) -> bool:
    """Whether *work* in hand takes one of the permits of a circuit; *tries*: it was let in for one.

    Of those that do not run, what has tried in vain takes none: perhaps the fault is theirs, and
    what comes after them would pass.
    """
    return tries if work.is_running else not work.history.outages


def eligibility(work: Work, *, key_held: bool, crash_limit: int) -> Eligibility:
    """Return whether *work*, whose turn it is, may run; *key_held*: something of its key waits.

    One that was parked is next in its key, and one that a replay has sent passes the quarantine
    of its own dead letter. A run that goes on after a wait was found eligible before.
    """
    if work.run.later is None:
        if key_held and work.row is None and work.replay.standing is not ReplayStanding.LIVE:
            return _PARK
        if work.history.crashes >= crash_limit:
            return Bury(ProcessKilled(work.history.crashes))
        if work.refused is not None:
            return Bury(work.refused)
    return _RUN_ALONE if work.history.crash_suspect else RUN


def replay_ending(
    meant_for: str | None, standing: ReplayStanding | None, *, overtakes: bool
) -> HandlerEnding | None:
    """Return how a replayed message ends that is not to be handled here; None: it may be.

    *meant_for* is another group, *standing* what the plan says, and one that *overtakes* would
    go ahead of one of its key that failed again in the same replay.
    """
    if meant_for is not None:
        return HandlerEnding.SKIPPED
    if overtakes:
        return HandlerEnding.HELD_BACK
    return None if standing is None else _REPLAY_ENDINGS.get(standing)
