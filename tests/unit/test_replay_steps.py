"""A plan decides its next step from counts alone; the canary, the ramp and the stops."""

from __future__ import annotations

import pytest

from holdfast.dlq.replay.plan import (
    Await,
    Bucket,
    Counted,
    Finish,
    NotNow,
    PlanState,
    Rate,
    Send,
    Stop,
    StopPolicy,
    StopUnconfirmed,
    check_move,
    gates,
    next_step,
)
from holdfast.dlq.replay.selection import LetterRef, arranged, digest, in_source_order
from holdfast.dlq.store.overtaking import place_of
from holdfast.errors import ConfigurationError
from holdfast.testing import VirtualClock

POLICY = StopPolicy(canary=10, ramp=(0.1, 0.5), patience=60)


def letter(
    number: int, *, key: str | None = None, kind: str = "a", version: str = "1"
) -> LetterRef:
    return LetterRef(
        dlq_id=f"id-{number}",
        topic="orders",
        group="billing",
        partition=0,
        position=str(number),
        key=None if key is None else key.encode(),
        fingerprint=kind,
        version=version,
    )


def test_a_plan_goes_by_canary_then_ramp_then_the_rest() -> None:
    """Each gate sends up to its number and no further."""
    assert gates(1000, POLICY) == (10, 100, 500, 1000)
    steps = [next_step(Counted(total=1000, sent=n, confirmed=n), POLICY) for n in (0, 10, 100, 500)]
    assert steps == [
        Send(10, PlanState.CANARY),
        Send(100, PlanState.RAMPING),
        Send(500, PlanState.RAMPING),
        Send(1000, PlanState.RUNNING),
    ]
    assert next_step(Counted(total=1000, sent=1000, confirmed=1000), POLICY) == Finish()


def test_nothing_follows_a_canary_that_is_not_confirmed() -> None:
    """The gate waits; when nobody confirms, the plan stops and says what to look at."""
    waiting = Counted(total=1000, sent=10, confirmed=9, waiting_below_sent=1, idle=59)
    assert next_step(waiting, POLICY) == Await(PlanState.CANARY)
    late = Counted(total=1000, sent=10, confirmed=9, waiting_below_sent=1, idle=60)
    step = next_step(late, POLICY)
    assert isinstance(step, Stop)
    assert "consumer" in step.reason


def test_one_failure_stops_a_canary() -> None:
    """However small its share."""
    assert isinstance(next_step(Counted(total=1000, sent=3, failed=1), POLICY), Stop)
    assert isinstance(next_step(Counted(total=5, sent=5, confirmed=4, failed=1), POLICY), Stop)


def test_a_failure_ratio_above_the_limit_stops_a_running_plan() -> None:
    """Below the limit, or with too few outcomes to tell, it goes on."""
    running = {"total": 1000, "sent": 700}
    few = Counted(**running, recent_confirmed=3, recent_failed=1)
    assert isinstance(next_step(few, POLICY), Send)
    fine = Counted(**running, recent_confirmed=95, recent_failed=5)
    assert isinstance(next_step(fine, POLICY), Send)
    bad = Counted(**running, recent_confirmed=94, recent_failed=6)
    assert isinstance(next_step(bad, POLICY), Stop)


def test_failures_stop_a_plan_as_soon_as_no_success_can_make_up_for_them() -> None:
    """Two at once are more than 5 % of any twenty; where none may fail, one is enough."""
    counted = Counted(total=1000, sent=700, recent_failed=2)
    step = next_step(counted, POLICY)
    assert isinstance(step, Stop)
    assert "2 of the last 2 failed again (100%" in step.reason
    counted = Counted(total=1000, sent=700, recent_confirmed=10, recent_failed=1)
    assert isinstance(next_step(counted, StopPolicy(failure_ratio=0)), Stop)
    half = StopPolicy(failure_ratio=0.5)
    assert isinstance(next_step(Counted(total=1000, sent=700, recent_failed=10), half), Send)
    assert isinstance(next_step(Counted(total=1000, sent=700, recent_failed=11), half), Stop)


def test_a_new_kind_of_failure_stops_a_plan() -> None:
    """One is enough: the new handler breaks in a way that the old one did not."""
    step = next_step(Counted(total=1000, sent=700, failed=1, new_fingerprints=("abc",)), POLICY)
    assert isinstance(step, Stop)
    assert "abc" in step.reason


def test_a_plan_that_was_sent_but_not_confirmed_is_not_done() -> None:
    """It ends unconfirmed, with the number of those that nobody spoke for."""
    counted = Counted(total=100, sent=100, confirmed=98, waiting_below_sent=2, idle=61)
    assert next_step(counted, POLICY) == StopUnconfirmed(2)


def test_a_plan_smaller_than_its_canary_is_all_canary() -> None:
    """And needs no ramp."""
    assert gates(4, POLICY) == (4,)
    assert next_step(Counted(total=4, sent=0), POLICY) == Send(4, PlanState.CANARY)


def test_nonsense_terms_are_refused() -> None:
    """With the value and the fix."""
    with pytest.raises(ConfigurationError, match="canary"):
        StopPolicy(canary=-1)
    with pytest.raises(ConfigurationError, match="ramp"):
        StopPolicy(ramp=(0.5, 0.1))
    with pytest.raises(ConfigurationError, match="failure ratio"):
        StopPolicy(failure_ratio=1.0)
    with pytest.raises(ConfigurationError, match="500/s"):
        Rate.parse("fast")
    with pytest.raises(ConfigurationError, match="above 0"):
        Rate.parse("0/s")


def test_a_plan_that_has_ended_goes_nowhere() -> None:
    """Done and aborted are final; only what is open can be paused or resumed."""
    for ended in (PlanState.DONE, PlanState.ABORTED):
        for wanted in set(PlanState) - {ended}:
            with pytest.raises(NotNow):
                check_move(ended, wanted)
    check_move(PlanState.STOPPED, PlanState.RUNNING)
    with pytest.raises(NotNow, match="paused"):
        check_move(PlanState.STOPPED, PlanState.PAUSED)


def test_positions_sort_by_number_and_not_by_text() -> None:
    """`9` comes before `10`, and a stream's `5-9` before `5-10`."""
    assert sorted(["10", "9", "100"], key=place_of) == ["9", "10", "100"]
    assert sorted(["5-10", "5-9", "4-11"], key=place_of) == ["4-11", "5-9", "5-10"]


def test_the_canary_has_some_of_every_kind_and_version() -> None:
    """Also of the rare ones."""
    letters = [letter(n, key=f"k{n}", kind="a" if n < 90 else "b") for n in range(98)]
    letters += [letter(n, key=f"k{n}", kind="b", version="2") for n in (98, 99)]
    canary = arranged(in_source_order(letters), 6)[:6]
    assert {(c.fingerprint, c.version) for c in canary} == {("a", "1"), ("b", "1"), ("b", "2")}


@pytest.mark.parametrize("keys", [1, 3, 7, 100])
@pytest.mark.parametrize("canary", [0, 1, 5, 20, 200])
def test_no_message_goes_ahead_of_an_earlier_one_of_its_key(keys: int, canary: int) -> None:
    """Whatever the canary takes to the front."""
    letters = [letter(n, key=f"k{n % keys}", kind="abc"[n % 3]) for n in reversed(range(100))]
    order = arranged(in_source_order(letters), canary)
    assert sorted(c.dlq_id for c in order) == sorted(c.dlq_id for c in letters)
    for key in {c.key for c in order}:
        positions = [place_of(c.position) for c in order if c.key == key]
        assert positions == sorted(positions)


def test_the_hash_of_a_manifest_tells_order_and_content() -> None:
    """Another order is another manifest."""
    assert digest(["a", "b"]) != digest(["b", "a"]) != digest(["ab"])


def test_a_rate_is_kept_and_an_idle_hour_is_not_made_up_for() -> None:
    """A burst is bounded by one second's worth."""
    clock = VirtualClock()
    bucket = Bucket(Rate.parse("100/s"), clock=clock)
    clock.advance(3600)
    assert bucket.grant(1000) == (100, 0.0)
    sent, waited = 0, 0.0
    while sent < 1000:
        granted, wait = bucket.grant(1000 - sent)
        sent += granted
        clock.advance(wait)
        waited += wait
    assert 9.9 <= waited <= 10.1
