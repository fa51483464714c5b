"""The breaker's state machine, checked against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ConfigurationError
from holdfast.circuit import (
    Breaker,
    CircuitOpen,
    CircuitPolicy,
    Closed,
    HalfOpen,
    LastCalls,
    LastSeconds,
    Open,
)
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from holdfast.circuit.breaker import Permit
    from holdfast.circuit.window import Window


@dataclass
class Naive:
    """The same rules, written the slow and obvious way."""

    policy: CircuitPolicy
    word: str = "closed"
    era: int = 0
    outcomes: list[tuple[bool, bool]] = field(default_factory=list)
    until: float = 0.0
    permits: int = 0

    def move(self, word: str, until: float = 0.0) -> None:
        self.word, self.era, self.outcomes, self.until = word, self.era + 1, [], until

    def bad(self, calls: int) -> bool:
        failed = sum(failed for failed, _ in self.outcomes)
        slow = sum(slow for _, slow in self.outcomes)
        return failed / calls >= self.policy.failure_rate or (
            self.policy.slow_seconds is not None and slow / calls >= self.policy.slow_rate
        )

    def admit(self, now: float) -> int | None:
        policy = self.policy
        if self.word == "half-open" and not self.permits and now >= self.until:
            missing = policy.permits - len(self.outcomes)
            self.outcomes += [(True, False)] * missing
            if self.bad(policy.permits):
                self.move("open", now + policy.open_seconds)
            else:
                self.move("closed")
        if self.word == "open" and now >= self.until:
            self.move("half-open")
            self.permits = policy.permits
        if self.word == "closed":
            return self.era
        if self.word == "half-open" and self.permits:
            self.permits -= 1
            self.until = now + policy.probe_seconds
            return self.era
        return None

    def report(self, era: int, *, failed: bool, slow: bool, now: float) -> None:
        if era != self.era or self.word == "open":
            return
        policy = self.policy
        self.outcomes.append((failed, slow))
        if self.word == "closed":
            assert isinstance(policy.window, LastCalls)
            self.outcomes = self.outcomes[-policy.window.size :]
            enough = len(self.outcomes) >= policy.minimum_calls
            if (failed or slow) and enough and self.bad(len(self.outcomes)):
                self.move("open", now + policy.open_seconds)
        elif self.bad(policy.permits):
            self.move("open", now + policy.open_seconds)
        elif len(self.outcomes) == policy.permits:
            self.move("closed")

    def give_back(self, era: int) -> None:
        if era == self.era and self.word == "half-open":
            self.permits += 1


WORDS = {Closed: "closed", Open: "open", HalfOpen: "half-open"}
POLICIES = st.builds(
    CircuitPolicy,
    failure_rate=st.sampled_from([0.3, 0.5, 1.0]),
    minimum_calls=st.integers(1, 4),
    window=st.builds(LastCalls, st.integers(4, 7)),
    slow_seconds=st.sampled_from([None, 2.0]),
    slow_rate=st.sampled_from([0.5, 1.0]),
    open_seconds=st.just(8.0),
    permits=st.integers(1, 3),
    probe_seconds=st.just(16.0),
)
STEPS = st.lists(
    st.one_of(
        st.just("admit"),
        st.tuples(st.sampled_from(["good", "bad", "back"]), st.integers(0, 9)),
        st.sampled_from([0.5, 2.0, 4.0, 16.0]),
    ),
    max_size=120,
)


@given(POLICIES, STEPS)
def test_the_breaker_does_what_the_naive_model_does(
    policy: CircuitPolicy, steps: list[str | float | tuple[str, int]]
) -> None:
    """Any interleaving of calls, stragglers, returned permits and time; state after each step."""
    clock = VirtualClock()
    breaker, naive = Breaker("x", policy, clock=clock), Naive(policy)
    running: list[tuple[Permit, int, float]] = []
    for step in steps:
        now = clock.monotonic()
        if step == "admit":
            era = naive.admit(now)
            try:
                permit = breaker.admit()
            except CircuitOpen:
                assert era is None
            else:
                assert era is not None
                running.append((permit, era, now))
        elif isinstance(step, tuple) and running:
            permit, era, started = running.pop(step[1] % len(running))
            slow = policy.slow_seconds is not None and now - started >= policy.slow_seconds
            if step[0] == "back":
                breaker.give_back(permit)
                naive.give_back(era)
            else:
                failed = step[0] == "bad"
                naive.report(era, failed=failed, slow=slow, now=now)
                (breaker.failed if failed else breaker.succeeded)(permit)
        elif isinstance(step, float):
            clock.advance(step)
        assert WORDS[type(breaker.state)] == naive.word
        if isinstance(breaker.state, HalfOpen):
            assert breaker.state.permits == naive.permits


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_a_window_of_calls_holds_the_last_ones(
    size: int, outcomes: list[tuple[bool, bool]]
) -> None:
    """As a list of the last outcomes would."""
    window = LastCalls(size)
    for failed, slow in outcomes:
        window = window.record(failed=failed, slow=slow, now=0)
    last = outcomes[-size:]
    counts = window.count(0)
    assert counts.calls == len(last)
    assert counts.failed == sum(failed for failed, _ in last)
    assert counts.slow == sum(slow for _, slow in last)
    assert window.is_steady() == (len(last) == size and not any(map(any, last)))


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60))
def test_a_window_of_seconds_holds_the_last_slices(steps: list[tuple[float, bool]]) -> None:
    """Exactly the outcomes of the current slice and the nine before it."""
    window, now, seen = LastSeconds(10), 1_000.0, []
    for passed, failed in steps:
        now += passed
        window = window.record(failed=failed, slow=False, now=now)
        seen.append((int(now), failed))
        recent = [failed for number, failed in seen if number > int(now) - 10]
        assert window.count(now).calls == len(recent)
        assert window.count(now).failed == sum(recent)
        assert len(window.slices) <= 10


@pytest.mark.parametrize("window", [LastCalls(10), LastSeconds(60)])
def test_both_windows_open_the_circuit(window: Window) -> None:
    """Half of ten calls failing opens it."""
    breaker = Breaker("x", CircuitPolicy(window=window), clock=VirtualClock())
    for _ in range(5):
        breaker.succeeded(breaker.admit())
    for _ in range(5):
        assert isinstance(breaker.state, Closed)
        breaker.failed(breaker.admit())
    assert isinstance(breaker.state, Open)


@pytest.mark.parametrize(
    ("nonsense", "field"),
    [
        ({"failure_rate": 0}, "failure_rate"),
        ({"slow_rate": 1.5}, "slow_rate"),
        ({"permits": 0}, "permits"),
        ({"open_seconds": -1}, "open_seconds"),
        ({"slow_seconds": 0}, "slow_seconds"),
        ({"minimum_calls": 200}, "never open"),
        ({"window": LastCalls(0)}, "never open"),
        ({"window": LastSeconds(0)}, "above 0"),
    ],
)
def test_nonsense_is_refused_when_it_is_written(nonsense: dict[str, object], field: str) -> None:
    """A circuit that could never open is a mistake, and says so."""
    with pytest.raises(ConfigurationError, match=field):
        CircuitPolicy(**nonsense)  # type: ignore[arg-type]
