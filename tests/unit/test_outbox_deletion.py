"""Ranges to delete hold the numbers asked for and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.outbox.relay.deleting import runs


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([], []),
        ([7], [(7, 7)]),
        ([5, 3, 4], [(3, 5)]),
        ([1, 2, 4, 5, 9], [(1, 2), (4, 5), (9, 9)]),
        ([1, 1, 3], [(1, 1), (3, 3)]),
    ],
)
def test_numbers_without_a_gap_are_one_range(
    numbers: list[int], found: list[tuple[int, int]]
) -> None:
    """A gap ends a range, a repeated number does not fill one."""
    assert runs(numbers) == found


def test_no_range_holds_a_number_that_was_not_asked_for() -> None:
    """Whatever the order, the gaps and the repeats."""
    random = Random(5)
    for _ in range(200):
        numbers = random.choices(range(60), k=random.randint(1, 90))
        held = [n for first, last in runs(numbers) for n in range(first, last + 1)]
        assert held == sorted(set(numbers))
