"""How the lanes of a member come and go.

`OwnedLanes` is the hand-over: what is ours now, and what the listener hears of it. It serves
every adapter. `GroupMember` adds the membership itself, where no broker keeps it: heartbeat,
look, lost → assigned → give up the surplus → look again, over a `GroupStore`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from holdfast.clock import Clock
    from holdfast.ports import Lane, Listener

Claim = TypeVar("Claim")
"""What a store says of a lane that was taken, for `enter`."""
State = TypeVar("State")
"""What an adapter knows of a lane that it owns."""

_BEATS = 3  # a session: two may fail before a member is taken for dead


class OwnedLanes(Generic[State]):
    """The lanes that belong to this member now; the listener hears of each change once.

    It hears `assigned` before anything else of a lane, then `revoked` or `lost`; of a lane that
    it was never told of it hears nothing.
    """

    def __init__(self, listener: Listener | None) -> None:
        self.lanes: dict[Lane, State] = {}
        """All that is ours on the broker, also what is being given up."""
        self.leaving: set[Lane] = set()
        """Lanes that the listener heard to be revoked, and that are not free yet."""
        self._listener = listener
        self._announced: set[Lane] = set()

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes owned now, without those that are being given up."""
        return frozenset(self.lanes.keys() - self.leaving)

    def announce(self) -> None:
        """Tell the listener of the lanes that it has not heard of, from an earlier try even."""
        news = sorted(self.lanes.keys() - self._announced - self.leaving)
        self._announced.update(news)
        if news and self._listener is not None:
            self._listener.assigned(news)

    def revoke(self, lanes: Iterable[Lane]) -> None:
        """Let the listener settle its work in *lanes*, which are about to leave."""
        lanes = [lane for lane in lanes if lane in self.lanes]
        news = sorted(self._announced.intersection(lanes))
        if news and self._listener is not None:
            self._listener.revoked(news)
        self._announced.difference_update(news)
        self.leaving.update(lanes)

    def remove(self, lanes: Iterable[Lane]) -> list[State]:
        """Forget *lanes*, which were given up; return what was known of them."""
        lanes = list(lanes)
        self._announced.difference_update(lanes)
        self.leaving.difference_update(lanes)
        return [self.lanes.pop(lane) for lane in lanes if lane in self.lanes]

    def lose(self, lanes: Iterable[Lane]) -> None:
        """Forget *lanes*, which have gone already, and tell the listener."""
        lanes = list(lanes)
        news = sorted(self._announced.intersection(lanes))
        self.remove(lanes)
        if news and self._listener is not None:
            self._listener.lost(news)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange(Generic[Claim]):
    """What a member must do after it looked at its group."""

    acquired: Mapping[Lane, Claim]
    """Lanes that are now ours."""
    surplus: frozenset[Lane]
    """Lanes of ours that somebody else should have: settle their work, then free them."""
    lost: frozenset[Lane]
    """Lanes that were ours and are not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What a member says of itself."""

    group: str
    member: str
    topics: Sequence[str]
    session: float
    """Seconds of silence after which it is taken for dead."""


class GroupStore(Protocol[Claim, State]):
    """One member's place in its group, as a broker keeps it.

    Every lane has an epoch that grows with each new owner; whatever an earlier owner still does
    to the lane changes nothing. `BrokerDown` from any method means that it may be called again.
    """

    @property
    def session(self) -> float:
        """Seconds of silence after which a member is taken for dead."""
        ...

    def has_news(self) -> bool:
        """Whether the group may have changed since the last `look`."""
        ...

    def look(self, mine: Mapping[Lane, State]) -> GroupChange[Claim]:
        """Stay alive, bury the dead, and take what `decide` says.

        A lane is taken in one step with the check that it is free, so it never has two owners.
        """
        ...

    def enter(self, lane: Lane, claim: Claim) -> State:
        """Return what a new owner starts from: all that is not settled comes again, in order."""
        ...

    def forget(self, states: Collection[State]) -> None:
        """Let go of what this member holds for lanes that it lost."""
        ...

    def free(self, states: Collection[State]) -> None:
        """Put back what is not settled in these lanes, without blame, and free them."""
        ...

    def leave(self, states: Collection[State]) -> None:
        """Free these lanes, which are all, and end the membership at once."""
        ...


class GroupMember(OwnedLanes[State], Generic[Claim, State]):
    """Keeps a membership alive, and its lanes as the group has them."""

    def __init__(
        self, store: GroupStore[Claim, State], clock: Clock, listener: Listener | None
    ) -> None:
        super().__init__(listener)
        self._store = store
        self._clock = clock
        self._looked = float("-inf")

    @property
    def next_look(self) -> float:
        """When the next heartbeat is due, by the monotonic clock."""
        return self._looked + self._store.session / _BEATS

    def keep(self) -> None:
        """Send a heartbeat when it is time, and follow what changed in the group.

        When this returns the listener knows of every lane, and none is being given up. A step
        that failed is made again by the next call.
        """
        now = self._clock.monotonic()
        if now < self.next_look and not self._store.has_news():
            return
        self._looked = float("-inf")
        surplus = self._look()
        if lanes := surplus | self.leaving:
            self.give_up(lanes)
            self._look()  # others may have freed some meanwhile
        self._looked = now

    def give_up(self, lanes: Collection[Lane]) -> None:
        """Let the listener settle, then put the rest back without blame and free the lanes."""
        self.revoke(lanes)
        self._store.free([self.lanes[lane] for lane in sorted(lanes)])
        self.remove(lanes)

    def leave(self) -> None:
        """Give up everything and go; the lanes are free for others when this returns."""
        self.revoke(self.lanes)
        self._store.leave(list(self.lanes.values()))
        self.remove(list(self.lanes))

    def lose(self, lanes: Iterable[Lane]) -> None:
        """Forget *lanes*, which have gone already, and tell the listener."""
        lanes = sorted(lanes)
        self._store.forget([self.lanes[lane] for lane in lanes if lane in self.lanes])
        super().lose(lanes)

    def _look(self) -> frozenset[Lane]:
        """Bring the lanes up to date; return those that somebody else should have."""
        change = self._store.look(self.lanes)
        if change.lost:
            self.lose(change.lost)
        for lane, claim in change.acquired.items():
            self.lanes[lane] = self._store.enter(lane, claim)
        self.announce()
        return change.surplus
