"""Lanes are shared fairly, each by one owner."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.brokers.groups.assignment import balance
from holdfast.ports import Lane

MEMBERS = st.sets(st.sampled_from("abcdefgh"), min_size=1)
LANES = st.integers(min_value=0, max_value=30)


def lanes(count: int, owners: dict[int, str] | None = None) -> dict[Lane, str | None]:
    """Return *count* lanes of one topic with their present owners."""
    return {Lane("orders", n): (owners or {}).get(n) for n in range(count)}


@given(MEMBERS, LANES)
def test_every_lane_has_one_owner_and_shares_differ_by_one(members: set[str], count: int) -> None:
    """Nobody idles while another has two more."""
    owners = balance(lanes(count), {name: frozenset({"orders"}) for name in members})
    assert set(owners) == set(lanes(count))
    loads = Counter(owners.values())
    shares = [loads[name] for name in members]
    assert max(shares) - min(shares) <= 1


@given(MEMBERS, LANES, st.data())
def test_owners_keep_what_they_may(members: set[str], count: int, data: st.DataObject) -> None:
    """A settled assignment does not move by itself, and a newcomer takes only its share."""
    subscribed = {name: frozenset({"orders"}) for name in members}
    settled = balance(lanes(count), subscribed)
    assert balance(dict(settled), subscribed) == settled
    newcomer = data.draw(st.sampled_from("xyz"))
    grown = balance(dict(settled), {**subscribed, newcomer: frozenset({"orders"})})
    moved = [lane for lane in settled if settled[lane] != grown[lane]]
    assert all(grown[lane] == newcomer for lane in moved)


def test_a_lane_goes_only_to_members_that_want_its_topic() -> None:
    """Members of one group may subscribe to different topics."""
    wanted = {"a": frozenset({"orders"}), "b": frozenset({"payments"})}
    owners = balance({Lane("orders", 0): None, Lane("payments", 0): None}, wanted)
    assert owners == {Lane("orders", 0): "a", Lane("payments", 0): "b"}


def test_a_topic_that_nobody_wants_has_no_owner() -> None:
    """Its lanes stay free."""
    assert balance({Lane("orders", 0): None}, {"b": frozenset({"payments"})}) == {}
