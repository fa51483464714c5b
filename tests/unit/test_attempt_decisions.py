"""What is decided before and after an attempt: pure decisions, the same whoever drives it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast import Message
from holdfast.circuit import CircuitPolicy, Closed, Open
from holdfast.consumer import Consumer, HandlerEnding, Settings
from holdfast.consumer.attempt.outcome import (
    HandlerOutcome,
    OutcomePolicy,
    ends_process,
    outcome_of,
)
from holdfast.consumer.parking.store import HandledElsewhere, ParkedKey, ParkedRow
from holdfast.consumer.scheduling.eligibility import (
    Bury,
    Park,
    ProcessKilled,
    Run,
    Turn,
    asks_circuits,
    eligibility,
    may_be_tested,
    may_share_batch,
    permits,
    replay_ending,
    takes_permit,
    turn,
)
from holdfast.consumer.scheduling.work import (
    ACK,
    Ack,
    Disposition,
    History,
    Release,
    ReplayFacts,
    RetryIn,
    Work,
    WorkState,
)
from holdfast.dlq.replay.admission import ReplayStanding, Withdrawn
from holdfast.errors import DependencyDown, PoisonMessage, StaleDelivery
from holdfast.ports import Delivery, Lane


def work(*, key: str | None = "k", **facts: Any) -> Work:
    """Return a message of a handler that does nothing."""
    consumer = Consumer("memory:", group="g")
    consumer.on("orders")(lambda order: None)
    message = Message.new("orders", b"1", key=key)
    return Work(route=consumer._routes["orders"], message=message, lane_key=(), **facts)


def row() -> ParkedRow:
    origin = Delivery(lane=Lane("orders", 0), position=1, key=b"k", body=b"1")
    return ParkedRow(1, ParkedKey("orders", "hash", b"k"), 2, origin)


def may(one: Work, *, key_held: bool = False) -> Any:
    return eligibility(one, key_held=key_held, crash_limit=3)


def turn_of(one: Work, *, key_held: bool = False, testing: bool = False) -> Turn:
    one.admit()
    return turn(one, key_held=key_held, now=100.0, testing=testing)


def test_the_first_of_a_key_runs_once_it_is_admitted_and_due() -> None:
    """The database is asked first, and a retry waits for its time."""
    assert turn(work(), key_held=False, now=100.0, testing=False) is Turn.NOT_YET
    assert turn_of(work(not_before=100.5)) is Turn.LATER
    assert turn_of(work(not_before=100.0)) is Turn.NOW


def test_suspects_run_apart_and_all_others_wait_for_them() -> None:
    """Unless they are only parked: that ends no process."""
    suspect = History(crash_suspect=True)
    assert turn_of(work(history=suspect)) is Turn.TESTED
    assert turn_of(work(history=suspect), testing=True) is Turn.TESTED
    assert turn_of(work(history=suspect), key_held=True) is Turn.NOW
    assert turn_of(work(), testing=True) is Turn.AFTER_TESTS


def test_suspects_are_tested_beside_suspects_alone() -> None:
    """At most so many at once, and a prime one beside nothing."""
    suspect, prime = work(), work(history=History(run_alone=True))
    for one in (suspect, prime):
        assert may_be_tested(one, others=0, tested=[], company=2)
        assert not may_be_tested(one, others=1, tested=[], company=2)
        assert not may_be_tested(one, others=0, tested=[prime], company=2)
    assert may_be_tested(suspect, others=0, tested=[work()], company=2)
    assert not may_be_tested(suspect, others=0, tested=[work(), work()], company=2)
    assert not may_be_tested(prime, others=0, tested=[work()], company=2)


@pytest.mark.parametrize(
    "facts",
    [
        {"history": History(failed_in_batch=True)},
        {"history": History(crash_suspect=True)},
        {"state": WorkState.REVOKED},
        {"row": row()},
        {"refused": ValueError("bytes")},
    ],
)
def test_nothing_unusual_runs_in_a_batch(facts: dict[str, Any]) -> None:
    """It would take the others down with it."""
    assert may_share_batch(work())
    assert not may_share_batch(work(**facts))


def test_what_is_only_parked_tries_no_circuit() -> None:
    """No handler runs."""
    assert asks_circuits(work(), key_held=False)
    assert not asks_circuits(work(), key_held=True)


def test_a_circuit_is_tried_once_its_time_has_come() -> None:
    """Closed: by everybody; open: by nobody; then by as many as it permits."""
    policy = CircuitPolicy(permits=2)
    assert permits(Closed(1, policy.window), policy, 0.0) == math.inf
    assert permits(Open(1, None), policy, 100.0) == 0
    assert permits(Open(1, 100.0), policy, 99.9) == 0
    assert permits(Open(1, 100.0), policy, 100.0) == 2


def test_what_has_tried_a_circuit_in_vain_takes_no_permit() -> None:
    """What comes after it might pass."""
    assert takes_permit(work(), tries=False)
    assert not takes_permit(work(history=History(outages=1)), tries=False)
    assert not takes_permit(work(state=WorkState.RUNNING), tries=False)
    assert takes_permit(work(state=WorkState.RUNNING), tries=True)


def test_an_ordinary_message_runs() -> None:
    """Nothing is known about it, and its key is free."""
    assert may(work()) == Run()


def test_a_message_waits_behind_its_key() -> None:
    """Also one that would be dead-lettered: what is ahead of it goes first."""
    assert may(work(), key_held=True) == Park()
    assert may(work(refused=ValueError("bytes")), key_held=True) == Park()


def test_a_parked_message_and_a_live_replay_pass_the_hold_of_their_key() -> None:
    """They are what the key waits for."""
    assert may(work(row=row()), key_held=True) == Run()
    assert may(work(replay=ReplayFacts(standing=ReplayStanding.LIVE)), key_held=True) == Run()
    assert may(work(replay=ReplayFacts(standing=ReplayStanding.ELSEWHERE)), key_held=True) == Park()


def test_what_ended_the_process_too_often_or_cannot_be_read_is_buried() -> None:
    """No handler sees it again."""
    found = may(work(history=History(crashes=3, crash_suspect=True)))
    assert isinstance(found, Bury)
    assert isinstance(found.error, ProcessKilled)
    error = ValueError("bytes")
    assert may(work(refused=error)) == Bury(error)


def test_a_suspect_is_marked_as_running_alone() -> None:
    """Its next crash is proof."""
    assert may(work(history=History(crashes=2, crash_suspect=True))) == Run(alone=True)


@pytest.mark.parametrize(
    ("standing", "ending"),
    [
        (None, None),
        (ReplayStanding.LIVE, None),
        (ReplayStanding.ELSEWHERE, None),
        (ReplayStanding.HELD, HandlerEnding.HELD_BACK),
        (ReplayStanding.DONE, HandlerEnding.DUPLICATE),
        (ReplayStanding.OVER, HandlerEnding.WITHDRAWN),
    ],
)
def test_a_replayed_message_ends_as_its_plan_says(
    standing: ReplayStanding | None, ending: HandlerEnding | None
) -> None:
    """Unless it is for another group, or would overtake one that failed again."""
    assert replay_ending(None, standing, overtakes=False) is ending
    assert replay_ending(None, standing, overtakes=True) is HandlerEnding.HELD_BACK
    assert replay_ending("other", standing, overtakes=True) is HandlerEnding.SKIPPED


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ValueError("no"), HandlerEnding.FAILED),
        (PoisonMessage("no"), HandlerEnding.FAILED),
        (DependencyDown("db"), HandlerEnding.RELEASED),
        (StaleDelivery("gone"), HandlerEnding.RELEASED),
        (Withdrawn("late"), HandlerEnding.WITHDRAWN),
    ],
)
def test_an_attempt_that_raised_ends_by_the_remedy_of_its_error(
    error: Exception, ending: HandlerEnding
) -> None:
    """Whatever else is known: nothing that raised is acknowledged as handled."""
    assert outcome_of(error, dead=True, duplicate=True) == HandlerOutcome(ending, error)


def test_an_attempt_that_returned_is_handled_a_duplicate_or_dead() -> None:
    """A dead letter goes before the word of the dedup row."""
    assert outcome_of(None, dead=False, duplicate=False).ending is HandlerEnding.HANDLED
    assert outcome_of(None, dead=False, duplicate=True).ending is HandlerEnding.DUPLICATE
    assert outcome_of(None, dead=True, duplicate=True).ending is HandlerEnding.DEAD_LETTERED


def test_only_what_is_no_exception_ends_the_process() -> None:
    """A handler's SystemExit does; a cancelled task does not."""
    import asyncio

    assert ends_process(SystemExit())
    assert not ends_process(asyncio.CancelledError())
    assert not ends_process(ValueError())


def step(
    one: Work, ending: HandlerEnding, error: Exception | None = None, **said: Any
) -> Disposition:
    policy = OutcomePolicy(Settings(**said), has_store=True)
    return policy.next_step(one, HandlerOutcome(ending, error))


def test_a_dead_letter_holds_its_key_where_keys_are_quarantined() -> None:
    """Not without a key, without a quarantine, or where whole partitions are in order."""
    dead = HandlerEnding.DEAD_LETTERED
    assert step(work(), dead) == Ack(holds=True)
    assert step(work(key=None), dead) == ACK
    assert step(work(), dead, quarantine=False) == ACK
    assert step(work(), dead, order="lane") == ACK


def test_a_released_message_keeps_its_turn_unless_it_belongs_to_others() -> None:
    """It waits in memory, no longer than patience."""
    down, stale = DependencyDown("db"), StaleDelivery("theirs")
    for error in (down, stale):
        found = step(work(history=History(outages=50)), HandlerEnding.RELEASED, error, patience=3.0)
        assert isinstance(found, RetryIn)
        assert 0 < found.delay <= 3.0
    assert step(work(state=WorkState.REVOKED), HandlerEnding.RELEASED, stale) == Release()
    assert step(work(), HandlerEnding.RELEASED, HandledElsewhere("done")) == Release()
    assert isinstance(step(work(state=WorkState.REVOKED), HandlerEnding.RELEASED, down), RetryIn)


def test_a_lease_of_somebody_else_says_itself_how_long_to_wait() -> None:
    """Its end is known."""
    taken = StaleDelivery("theirs")
    taken.retry_after = 1.5  # type: ignore[attr-defined]
    assert step(work(), HandlerEnding.RELEASED, taken, patience=3.0) == RetryIn(1.5)
    assert step(work(), HandlerEnding.RELEASED, taken, patience=1.0) == RetryIn(1.0)


def test_long_waits_are_not_spent_in_memory_but_those_of_replays_are() -> None:
    """A parked replay would be overtaken by the replays behind it."""
    policy = OutcomePolicy(Settings(patience=5.0), has_store=True)
    assert policy.is_long(work(), 6.0)
    assert not policy.is_long(work(), 5.0)
    assert not policy.is_long(work(state=WorkState.REVOKED), 6.0)
    replayed = work()
    replayed.message = replayed.message.with_(replayed=True)
    assert not policy.is_long(replayed, 6.0)


def test_a_message_is_admitted_runs_and_waits_for_its_next_attempt() -> None:
    """As often as it takes."""
    one = work()
    assert not one.is_admitted
    one.admit()
    for _ in range(2):
        assert one.begin()
        assert one.is_running
        one.end()
        assert (one.is_admitted, one.is_running) == (True, False)


def test_what_was_revoked_while_it_ran_never_runs_or_settles_again() -> None:
    """Its handler may end; whatever comes of it belongs to somebody else."""
    one = work()
    one.admit()
    one.begin()
    one.revoke()
    assert (one.is_running, one.is_revoked) == (True, True)
    one.end()
    assert (one.is_running, one.is_revoked) == (False, True)
    one.admit()
    assert not one.begin()
    assert one.is_revoked


def test_what_was_revoked_before_it_was_admitted_stays_so() -> None:
    """The answer of the database comes too late."""
    one = work()
    one.revoke()
    one.admit()
    assert not one.begin()
