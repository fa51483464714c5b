"""The checks accept what the guarantees allow, and name what breaks them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.testing import (
    Violation,
    check_effects_once,
    check_nothing_lost,
    check_order_per_key,
)

PAIRS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), unique=True)


def test_a_lost_message_is_named() -> None:
    """Whatever was sent and not seen is lost."""
    with pytest.raises(Violation, match="nothing is lost, but: 2, 4") as it:
        check_nothing_lost([1, 2, 3, 4], [3, 1])
    assert it.value.witnesses == [2, 4]


def test_many_lost_messages_are_not_all_listed() -> None:
    """The error stays readable."""
    with pytest.raises(Violation, match="9 and 990 more"):
        check_nothing_lost(range(1000), [])


def test_a_repeated_effect_is_named() -> None:
    """Two of one are one too many."""
    check_effects_once([1, 2, 3])
    with pytest.raises(Violation, match="each effect happens once, but: 2"):
        check_effects_once([1, 2, 3, 2])


def test_an_overtaking_message_is_named_with_its_key() -> None:
    """Order is per key: other keys may interleave."""
    sent = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    check_order_per_key(sent, [("b", 1), ("b", 2), ("a", 1), ("a", 2)])
    with pytest.raises(Violation, match=r"\('a', \[2, 1\]\)"):
        check_order_per_key(sent, [("b", 1), ("a", 2), ("a", 1)])


def test_a_skipped_message_is_a_disorder_once_a_later_one_came() -> None:
    """A gap in a key is an overtaking, even before the missing one comes."""
    with pytest.raises(Violation):
        check_order_per_key([("a", 1), ("a", 2)], [("a", 2)])


def test_a_duplicate_is_no_disorder() -> None:
    """At least once may repeat; only first sightings have an order."""
    check_order_per_key([("a", 1), ("a", 2)], [("a", 1), ("a", 2), ("a", 1)])


def test_messages_without_a_key_have_no_order() -> None:
    """None is not a key."""
    check_order_per_key([(None, 1), (None, 2)], [(None, 2), (None, 1)])


@given(PAIRS, st.permutations("abc"))
def test_any_interleaving_of_the_keys_is_in_order(
    sent: list[tuple[str, int]], order: list[str]
) -> None:
    """What keeps each key's order passes, however the keys are mixed."""
    seen = sorted(sent, key=lambda pair: order.index(pair[0]))
    check_order_per_key(sent, seen)
    check_nothing_lost(sent, seen)


@given(PAIRS.filter(lambda pairs: len({key for key, _ in pairs}) < len(pairs)))
def test_any_swap_within_a_key_is_found(sent: list[tuple[str, int]]) -> None:
    """Two messages of one key in the wrong order never pass."""
    key = next(k for k, _ in sent if sum(k == own for own, _ in sent) > 1)
    first, second = [i for i, (own, _) in enumerate(sent) if own == key][:2]
    seen = list(sent)
    seen[first], seen[second] = seen[second], seen[first]
    with pytest.raises(Violation):
        check_order_per_key(sent, seen)
