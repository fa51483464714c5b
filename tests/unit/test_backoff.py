"""Backoff: delays within bounds, for any attempt, repeatable from a seed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ConfigurationError
from holdfast.retry import Backoff, Jitter

SECONDS = st.floats(min_value=1e-9, max_value=1e9)


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    first, ceiling = sorted((draw(SECONDS), draw(SECONDS)))
    return Backoff(
        first=first,
        ceiling=ceiling,
        factor=draw(st.floats(min_value=1, max_value=1e6)),
        jitter=draw(st.sampled_from(Jitter)),
        randomness=random.Random(draw(st.integers())),
    )


@given(backoffs(), st.integers(min_value=1, max_value=10**400))
def test_no_attempt_number_overflows_or_leaves_the_bounds(backoff: Backoff, attempt: int) -> None:
    """A counter that ran for years still gives a sensible delay."""
    delay = backoff.delay(attempt)
    assert delay is not None
    assert 0 <= delay <= backoff.ceiling


@given(st.integers(min_value=1, max_value=60), st.integers())
def test_each_jitter_keeps_to_its_own_range(attempt: int, seed: int) -> None:
    """Full: from nothing; equal: the upper half; decorrelated: from the first delay."""
    lowest = {
        Jitter.NONE: lambda whole: whole,
        Jitter.FULL: lambda _: 0.0,
        Jitter.EQUAL: lambda whole: whole / 2,
        Jitter.DECORRELATED: lambda _: 0.5,
    }
    for jitter, floor in lowest.items():
        backoff = Backoff(first=0.5, ceiling=40, jitter=jitter, randomness=random.Random(seed))
        delay = backoff.delay(attempt)
        assert delay is not None
        assert floor(backoff.longest(attempt)) <= delay <= 40


@given(st.integers())
def test_decorrelated_delays_grow_from_the_previous_one(seed: int) -> None:
    """Each is at most three times the one before, so clients drift apart step by step."""
    backoff = Backoff(
        first=0.1, ceiling=20, jitter=Jitter.DECORRELATED, randomness=random.Random(seed)
    )
    delays = [0.1]
    for attempt in range(1, 30):
        delay = backoff.delay(attempt, delays[-1])
        assert delay is not None
        delays.append(delay)
    assert all(0.1 <= after <= min(20, before * 3 + 1e-9) for before, after in pairwise(delays))


def test_without_jitter_the_delays_double_up_to_the_ceiling() -> None:
    """The growth itself is exact."""
    backoff = Backoff(first=0.1, ceiling=0.5, attempts=6, jitter=Jitter.NONE)
    assert [backoff.delay(n) for n in range(1, 7)] == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_the_same_seed_gives_the_same_delays() -> None:
    """Randomness is injected, so a run can be repeated."""

    def delays() -> list[float | None]:
        backoff = Backoff(randomness=random.Random(7))
        return [backoff.delay(n) for n in range(1, 9)]

    assert delays() == delays()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"first": 0.0},
        {"first": 2.0, "ceiling": 1.0},
        {"ceiling": float("inf")},
        {"first": float("nan")},
        {"factor": 0.5},
        {"factor": float("inf")},
        {"attempts": 0},
    ],
)
def test_nonsense_is_refused_when_it_is_written(nonsense: dict[str, float]) -> None:
    """The message names the field."""
    with pytest.raises(ConfigurationError, match=next(iter(nonsense))):
        Backoff(**nonsense)  # type: ignore[arg-type]
