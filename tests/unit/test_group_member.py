"""Lanes change hands in order; a step that fails is made again, and is heard of once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast import BrokerDown
from holdfast.brokers.groups.assignment import decide
from holdfast.brokers.groups.member import GroupChange, GroupMember, OwnedLanes
from holdfast.ports import Lane
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

ONE, TWO, THREE = (Lane("orders", n) for n in range(3))
TOPICS = frozenset({"orders"})


class Table:
    """The group as all its members see it."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.owners: dict[Lane, str | None] = dict.fromkeys(lanes)
        self.members: dict[str, frozenset[str]] = {}
        self.changes = 0


class Store:
    """One member's place in a `Table`; fails where it is told to."""

    session = 9.0

    def __init__(self, table: Table, name: str) -> None:
        self.table, self.name = table, name
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self._seen = -1

    def _step(self, name: str, what: object = "") -> None:
        self.calls.append(f"{name} {what}".strip())
        if name in self.failing:
            self.failing.discard(name)
            raise BrokerDown(f"{name} failed")

    def has_news(self) -> bool:
        return self._seen != self.table.changes

    def look(self, mine: Mapping[Lane, str]) -> GroupChange[int]:
        self._step("look")
        self.table.changes += self.name not in self.table.members
        self.table.members[self.name] = TOPICS
        decision = decide(self.name, mine, self.table.owners, self.table.members)
        self.table.owners.update(dict.fromkeys(decision.take, self.name))
        self._seen = self.table.changes
        acquired = dict.fromkeys(sorted(decision.take), 1)
        return GroupChange(acquired=acquired, surplus=decision.surplus, lost=decision.lost)

    def enter(self, lane: Lane, claim: int) -> str:
        self._step("enter", lane.partition)
        return f"{lane.partition}@{claim}"

    def forget(self, states: Collection[str]) -> None:
        self._step("forget", ",".join(states))

    def free(self, states: Collection[str]) -> None:
        self._step("free", ",".join(states))
        for state in states:
            self.table.owners[Lane("orders", int(state[0]))] = None
        self.table.changes += 1

    def leave(self, states: Collection[str]) -> None:
        self.free(states)
        del self.table.members[self.name]


class Heard:
    """A listener that notes what it hears, and fails where it is told to."""

    def __init__(self) -> None:
        self.news: list[tuple[str, list[int]]] = []
        self.failing: set[str] = set()

    def _note(self, what: str, lanes: Iterable[Lane]) -> None:
        if what in self.failing:
            self.failing.discard(what)
            raise BrokerDown("settling failed")
        self.news.append((what, [lane.partition for lane in lanes]))

    def assigned(self, lanes: Iterable[Lane]) -> None:
        self._note("assigned", lanes)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        self._note("revoked", lanes)

    def lost(self, lanes: Iterable[Lane]) -> None:
        self._note("lost", lanes)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def table() -> Table:
    return Table([ONE, TWO])


def joined(
    table: Table, name: str, clock: VirtualClock
) -> tuple[GroupMember[int, str], Store, Heard]:
    """Return a member that has not looked at its group yet."""
    store, heard = Store(table, name), Heard()
    return GroupMember(store, clock, heard), store, heard


def test_a_newcomer_gets_its_share_once_it_was_given_up(table: Table, clock: VirtualClock) -> None:
    """The owner settles and frees the surplus first; nobody takes what is not free."""
    first, _, heard = joined(table, "a", clock)
    first.keep()
    assert first.assignment() == {ONE, TWO}
    second, _, later = joined(table, "b", clock)
    second.keep()
    assert second.assignment() == frozenset()
    first.keep()
    second.keep()
    assert (first.assignment(), second.assignment()) == ({ONE}, {TWO})
    assert heard.news == [("assigned", [0, 1]), ("revoked", [1])]
    assert later.news == [("assigned", [1])]


def test_without_news_only_the_heartbeat_looks(table: Table, clock: VirtualClock) -> None:
    """Three times a session, and at once when the group has changed."""
    member, store, _ = joined(table, "a", clock)
    member.keep()
    store.calls.clear()
    member.keep()
    clock.advance(2.9)
    member.keep()
    assert store.calls == []
    clock.advance(0.1)
    member.keep()
    assert store.calls == ["look"]
    table.changes += 1
    member.keep()
    assert store.calls == ["look", "look"]


def test_a_lane_that_was_revoked_is_freed_even_after_a_failure(
    table: Table, clock: VirtualClock
) -> None:
    """It is not ours any more for the listener, which is told so once; the next call frees it."""
    first, store, heard = joined(table, "a", clock)
    first.keep()
    second, _, _ = joined(table, "b", clock)
    second.keep()
    store.failing = {"free"}
    with pytest.raises(BrokerDown):
        first.keep()
    assert first.assignment() == {ONE}
    first.keep()
    second.keep()
    assert second.assignment() == {TWO}
    assert heard.news == [("assigned", [0, 1]), ("revoked", [1])]


def test_a_revoked_lane_that_stays_ours_after_all_is_assigned_anew(
    table: Table, clock: VirtualClock
) -> None:
    """The listener dropped its work; nobody would read the lane if it were not told again."""
    first, store, heard = joined(table, "a", clock)
    first.keep()
    second, rival, _ = joined(table, "b", clock)
    second.keep()
    store.failing = {"free"}
    with pytest.raises(BrokerDown):
        first.keep()
    rival.leave([])
    first.keep()
    assert first.assignment() == {ONE, TWO}
    assert heard.news == [("assigned", [0, 1]), ("revoked", [1]), ("assigned", [1])]


def test_a_listener_that_failed_to_settle_is_asked_again(table: Table, clock: VirtualClock) -> None:
    """Nothing is freed before its work is settled."""
    first, _, heard = joined(table, "a", clock)
    first.keep()
    second, _, _ = joined(table, "b", clock)
    second.keep()
    heard.failing = {"revoked"}
    with pytest.raises(BrokerDown):
        first.keep()
    assert table.owners == {ONE: "a", TWO: "a"}
    first.keep()
    assert heard.news == [("assigned", [0, 1]), ("revoked", [1])]


def test_what_could_not_be_entered_is_entered_by_the_next_call(
    table: Table, clock: VirtualClock
) -> None:
    """A lane that was taken is ours by the books; it is not forgotten until a session ends."""
    member, store, heard = joined(table, "a", clock)
    store.failing = {"enter"}
    with pytest.raises(BrokerDown):
        member.keep()
    assert heard.news == []
    member.keep()
    assert member.assignment() == {ONE, TWO}
    assert heard.news == [("assigned", [0, 1])]


def test_what_is_lost_is_dropped_before_it_is_entered_again(
    table: Table, clock: VirtualClock
) -> None:
    """A member that was taken for dead hears so, and then starts anew."""
    member, store, heard = joined(table, "a", clock)
    member.keep()
    store.calls.clear()
    table.owners = dict.fromkeys(table.owners)
    table.changes += 1
    member.keep()
    assert heard.news == [("assigned", [0, 1]), ("lost", [0, 1]), ("assigned", [0, 1])]
    assert store.calls == ["look", "forget 0@1,1@1", "enter 0", "enter 1"]


def test_leaving_frees_all_and_tells_the_listener_once(table: Table, clock: VirtualClock) -> None:
    """Also when the first try fails."""
    member, store, heard = joined(table, "a", clock)
    member.keep()
    store.failing = {"free"}
    with pytest.raises(BrokerDown):
        member.leave()
    member.leave()
    assert table.owners == {ONE: None, TWO: None}
    assert member.assignment() == frozenset()
    assert heard.news == [("assigned", [0, 1]), ("revoked", [0, 1])]


def test_the_listener_hears_nothing_of_a_lane_that_it_never_had() -> None:
    """Neither that it leaves nor that it is gone."""
    heard = Heard()
    owned: OwnedLanes[str] = OwnedLanes(heard)
    owned.lanes[THREE] = "three"
    owned.revoke([THREE, ONE])
    owned.lose([THREE, TWO])
    assert heard.news == []
    assert owned.lanes == {}


def test_a_member_takes_only_what_is_free_and_keeps_what_is_its_share() -> None:
    """A lane that another member has by now is lost, whoever should have it."""
    owners = {ONE: "b", TWO: "a", THREE: None}
    members = {"a": frozenset({"orders"}), "b": frozenset({"orders"})}
    decision = decide("a", {ONE, TWO}, owners, members)
    assert (decision.lost, decision.surplus, decision.take) == ({ONE}, frozenset(), {THREE})
