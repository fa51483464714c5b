"""The checks accept what the guarantees allow, and name what breaks them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.testing import (
    Violation,
    VirtualClock,
    check_effects_once,
    check_nothing_invented,
    check_nothing_left,
    check_nothing_lost,
    check_order_per_key,
    settled,
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


def test_what_was_never_sent_is_named() -> None:
    """An effect of a transaction that was rolled back."""
    check_nothing_invented([1, 2], [2, 1, 1])
    with pytest.raises(Violation, match=r"never committed, but: 3$"):
        check_nothing_invented([1, 2], [1, 3, 2, 3])


def test_whatever_is_left_is_named_with_its_place() -> None:
    """Empty places are fine."""
    check_nothing_left({"lag": 0, "held": 0})
    with pytest.raises(Violation, match="left standing, but: 'held: 2'"):
        check_nothing_left({"lag": 0, "held": 2})


def test_what_moves_settles() -> None:
    """Each look finds less; one that fails is no answer."""
    lag = iter([3, 2, 1, 0])

    def standing() -> dict[str, int]:
        if (now := next(lag)) == 2:
            raise ConnectionError
        return {"lag": now}

    settled(standing, within=10, clock=VirtualClock(auto=True))
    assert next(lag, None) is None


def test_what_stands_still_is_no_good_run() -> None:
    """Nothing is lost, nothing is wrong, and nothing moves: that is a violation."""
    clock = VirtualClock(auto=True)
    with pytest.raises(Violation, match=r"nothing stands 10 s after the last fault, but: 'lag: 4'"):
        settled(lambda: {"lag": 4, "held": 0}, within=10, clock=clock)
    with pytest.raises(Violation, match=r"but: ConnectionError\('gone'\)"):
        settled(_gone, within=10, clock=clock)


def _gone() -> dict[str, int]:
    raise ConnectionError("gone")


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
