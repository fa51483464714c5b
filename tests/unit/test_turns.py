"""Turns: order per key in what is on its way to a broker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.brokers.turns import Key, KeyTurns

A, B, K, OTHER = (("orders", key) for key in (b"a", b"b", b"k", b"o"))


def test_the_next_of_a_key_goes_when_the_one_before_it_is_stored() -> None:
    """Other keys, and messages without one, do not wait."""
    turns: KeyTurns[str] = KeyTurns(1)
    assert turns.may_go(K, "k1")
    assert not turns.may_go(K, "k2")
    assert turns.may_go(OTHER, "o1")
    assert [turns.may_go(None, "free") for _ in range(2)] == [True, True]
    assert turns.stored(K) == "k2"
    assert not turns.may_go(K, "k3")
    assert turns.stored(K) == "k3"
    assert turns.stored(K) is None
    assert turns.may_go(K, "k4")


def test_nothing_of_a_key_goes_behind_one_that_was_refused() -> None:
    """What waits is given back to be told so."""
    turns: KeyTurns[str] = KeyTurns(1)
    turns.may_go(K, "k1")
    turns.may_go(K, "k2")
    turns.may_go(K, "k3")
    assert turns.refused(K) == ["k2", "k3"]
    assert turns.refused(None) == []


@given(
    window=st.integers(1, 3),
    keys=st.lists(st.sampled_from([A, B, None]), max_size=30),
    choices=st.lists(st.booleans(), max_size=60),
)
def test_whatever_the_broker_answers_every_message_ends_once_and_no_key_exceeds_its_window(
    window: int, keys: list[Key | None], choices: list[bool]
) -> None:
    """With a window of one, the stored ones of a key are a prefix of it."""
    turns: KeyTurns[int] = KeyTurns(window)
    sent = [place for place, key in enumerate(keys) if turns.may_go(key, place)]
    stored, lost = list[int](), list[int]()
    answers = iter(choices)
    while sent:
        for key in (A, B):
            assert sum(keys[place] == key for place in sent) <= window
        place = sent.pop(0)
        if next(answers, True):
            stored.append(place)
            following = turns.stored(keys[place])
            sent += [] if following is None else [following]
        else:
            lost += [place, *turns.refused(keys[place])]
    assert sorted(stored + lost) == list(range(len(keys)))
    if window == 1:
        for key in (A, B):
            mine = [place for place, own in enumerate(keys) if own == key]
            kept = [place for place in mine if place in stored]
            assert kept == mine[: len(kept)]
