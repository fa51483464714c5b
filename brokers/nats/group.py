"""A consumer group as one value: its members, and who owns which lane. No I/O.

The value is kept as JSON in the key-value bucket `holdfast` under the group's name, and every
change is a compare-and-set of the whole. Times are the server's, so clocks need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.balance import balance
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Seat(msgspec.Struct):
    """A member of the group."""

    topics: list[str]
    until: float
    """When it is taken for dead, in POSIX seconds by the server's clock."""


class Ownership(msgspec.Struct, omit_defaults=True):
    """A lane, as its group has it."""

    owner: str | None = None
    epoch: int = 0
    """Grows with every change of owner and every seek."""
    left: str = ""
    """The server that was told of everything the last owner gave back; empty if none was.

    A server forgets that when it restarts, and hands out other messages first.
    """
    seeks: int = 0
    """How often the group was moved; each move has a consumer of its own."""
    start: int | str | None = None
    """Where the last seek went: a sequence, or a time in RFC 3339."""


class Group(msgspec.Struct):
    """The whole group."""

    generation: int = 0
    """Grows whenever somebody may have to do something."""
    members: dict[str, Seat] = {}
    lanes: dict[str, list[Ownership]] = {}

    def owned(self, lane: Lane) -> Ownership:
        """Return the entry of *lane*."""
        return self.lanes[lane.topic][lane.partition]

    def entries(self) -> Iterator[tuple[Lane, Ownership]]:
        """Yield every lane with its entry."""
        for topic, owners in self.lanes.items():
            for partition, entry in enumerate(owners):
                yield Lane(topic, partition), entry

    def held_by(self, member: str) -> frozenset[Lane]:
        """Return the lanes of *member*."""
        return frozenset(lane for lane, entry in self.entries() if entry.owner == member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a member must do after it looked at its group."""

    acquired: dict[Lane, Ownership]
    """Lanes that are now ours; `left` says how their last owner did leave them."""
    surrender: frozenset[Lane]
    """Lanes of ours that somebody else should have: settle their work, then free them."""
    lost: frozenset[Lane]
    """Lanes that were ours and are not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """What a member says of itself."""

    name: str
    topics: Mapping[str, int]
    """Its topics, with their numbers of lanes."""
    session: float


def look(
    group: Group, me: Me, now: float, mine: frozenset[Lane], *, spare: bool = False
) -> Verdict:
    """Stay alive, bury the dead unless told to *spare* them, and take what should be ours."""
    stay(group, me, now)
    if not spare:
        _bury(group, now)
    for topic, count in me.topics.items():
        owners = group.lanes.setdefault(topic, [])
        owners.extend(Ownership() for _ in range(count - len(owners)))
    members = {name: frozenset(seat.topics) for name, seat in group.members.items()}
    wanted = frozenset().union(*members.values())
    lanes = {lane: entry.owner for lane, entry in group.entries() if lane.topic in wanted}
    target = balance(lanes, members)
    ours = {lane for lane, owner in target.items() if owner == me.name}
    held = group.held_by(me.name)
    free = {lane for lane, owner in lanes.items() if owner is None}
    acquired = {lane: _take(group.owned(lane), me.name) for lane in (ours & free) | (held - mine)}
    return Verdict(acquired=acquired, surrender=frozenset((held & mine) - ours), lost=mine - held)


def stay(group: Group, me: Me, now: float) -> None:
    """Be a member until a session from *now*."""
    if me.name not in group.members:
        group.generation += 1
    group.members[me.name] = Seat(sorted(me.topics), now + me.session)


def free(group: Group, member: str, lanes: Mapping[Lane, str]) -> None:
    """Let *member* give up *lanes*; the values name the server that was told all of it."""
    for lane, left in lanes.items():
        entry = group.owned(lane)
        if entry.owner == member:
            entry.owner, entry.left = None, left
            group.generation += 1


def leave(group: Group, member: str) -> None:
    """Let *member* go; what it has not freed counts as left behind in a crash."""
    if group.members.pop(member, None) is not None:
        _orphan(group, [member])


def move(group: Group, member: str, lane: Lane, start: int | str) -> Ownership | None:
    """Put the group at *start* under a new epoch, if *lane* is *member*'s."""
    entry = group.owned(lane)
    if entry.owner != member:
        return None
    entry.epoch += 1
    entry.seeks += 1
    entry.start = start
    return entry


def _bury(group: Group, now: float) -> None:
    dead = [name for name, seat in group.members.items() if seat.until < now]
    for name in dead:
        del group.members[name]
    if dead:
        _orphan(group, dead)


def _orphan(group: Group, members: Iterable[str]) -> None:
    group.generation += 1
    gone = set(members)
    for _, entry in group.entries():
        if entry.owner in gone:
            entry.owner, entry.left = None, ""


def _take(entry: Ownership, member: str) -> Ownership:
    """Give *entry* to *member* under a new epoch; return how it was left, with that epoch."""
    left = entry.left
    entry.owner, entry.left = member, ""
    entry.epoch += 1
    return msgspec.structs.replace(entry, left=left)
