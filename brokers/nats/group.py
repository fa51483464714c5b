"""A consumer group as one value: its members, and who owns which lane. No I/O.

The value is kept as JSON in the key-value bucket `holdfast` under the group's name, and every
change is a compare-and-set of the whole. Times are the server's, so clocks need not agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.groups.assignment import decide
from holdfast.brokers.groups.member import GroupChange
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from holdfast.brokers.groups.member import Subscription


class MemberEntry(msgspec.Struct):
    """A member of the group."""

    topics: list[str]
    until: float
    """When it is taken for dead, in POSIX seconds by the server's clock."""


class LaneEntry(msgspec.Struct, omit_defaults=True):
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


class GroupRecord(msgspec.Struct):
    """The whole group."""

    generation: int = 0
    """Grows whenever somebody may have to do something."""
    members: dict[str, MemberEntry] = {}
    lanes: dict[str, list[LaneEntry]] = {}

    def owned(self, lane: Lane) -> LaneEntry:
        """Return the entry of *lane*."""
        return self.lanes[lane.topic][lane.partition]

    def entries(self) -> Iterator[tuple[Lane, LaneEntry]]:
        """Yield every lane with its entry."""
        for topic, owners in self.lanes.items():
            for partition, entry in enumerate(owners):
                yield Lane(topic, partition), entry

    def held_by(self, member: str) -> frozenset[Lane]:
        """Return the lanes of *member*."""
        return frozenset(lane for lane, entry in self.entries() if entry.owner == member)


def look(
    group: GroupRecord,
    me: Subscription,
    topics: Mapping[str, int],
    now: float,
    mine: frozenset[Lane],
    *,
    spare: bool = False,
) -> GroupChange[LaneEntry]:
    """Stay alive, bury the dead unless told to *spare* them, and take what should be ours.

    *topics* are ours, with their numbers of lanes. What is acquired says how its last owner
    left it.
    """
    stay(group, me, now)
    if not spare:
        _bury(group, now)
    for topic, count in topics.items():
        entries = group.lanes.setdefault(topic, [])
        entries.extend(LaneEntry() for _ in range(count - len(entries)))
    members = {name: frozenset(entry.topics) for name, entry in group.members.items()}
    wanted = frozenset().union(*members.values())
    owners = {lane: entry.owner for lane, entry in group.entries() if lane.topic in wanted}
    decision = decide(me.member, mine, owners, members)
    return GroupChange(
        acquired={lane: _take(group.owned(lane), me.member) for lane in sorted(decision.take)},
        surplus=decision.surplus,
        lost=decision.lost,
    )


def stay(group: GroupRecord, me: Subscription, now: float) -> None:
    """Be a member until a session from *now*."""
    if me.member not in group.members:
        group.generation += 1
    group.members[me.member] = MemberEntry(sorted(me.topics), now + me.session)


def free(group: GroupRecord, member: str, lanes: Mapping[Lane, str]) -> None:
    """Let *member* give up *lanes*; the values name the server that was told all of it."""
    for lane, left in lanes.items():
        entry = group.owned(lane)
        if entry.owner == member:
            entry.owner, entry.left = None, left
            group.generation += 1


def leave(group: GroupRecord, member: str) -> None:
    """Let *member* go; what it has not freed counts as left behind in a crash."""
    if group.members.pop(member, None) is not None:
        _orphan(group, [member])


def move(group: GroupRecord, member: str, lane: Lane, start: int | str) -> LaneEntry | None:
    """Put the group at *start* under a new epoch, if *lane* is *member*'s."""
    entry = group.owned(lane)
    if entry.owner != member:
        return None
    entry.epoch += 1
    entry.seeks += 1
    entry.start = start
    return entry


def _bury(group: GroupRecord, now: float) -> None:
    dead = [name for name, entry in group.members.items() if entry.until < now]
    for name in dead:
        del group.members[name]
    if dead:
        _orphan(group, dead)


def _orphan(group: GroupRecord, members: Iterable[str]) -> None:
    group.generation += 1
    gone = set(members)
    for _, entry in group.entries():
        if entry.owner in gone:
            entry.owner, entry.left = None, ""


def _take(entry: LaneEntry, member: str) -> LaneEntry:
    """Give *entry* to *member* under a new epoch; return how it was left, with that epoch."""
    left = entry.left
    entry.owner, entry.left = member, ""
    entry.epoch += 1
    return msgspec.structs.replace(entry, left=left)
