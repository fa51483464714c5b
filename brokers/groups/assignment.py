"""Who should own which lane of a group: decisions only, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.ports import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows for one member from who owns what now."""

    take: frozenset[Lane]
    """Free lanes that should be ours, and ours by the books that are not held here."""
    surplus: frozenset[Lane]
    """Lanes of ours that somebody else should have: settle their work, then free them."""
    lost: frozenset[Lane]
    """Lanes that were ours and are not any more."""


def decide(
    member: str,
    mine: Collection[Lane],
    owners: Mapping[Lane, str | None],
    members: Mapping[str, frozenset[str]],
) -> Decision:
    """Return what *member*, which holds *mine*, must do.

    *owners* has the living owner of each lane, None where it is free; *members* the topics of
    each living member. A lane is taken only once it is free: nobody is overtaken.
    """
    target = balance(owners, members)
    ours = {lane for lane, owner in target.items() if owner == member}
    held = {lane for lane, owner in owners.items() if owner == member}
    free = {lane for lane, owner in owners.items() if owner is None}
    return Decision(
        take=frozenset((ours & free) | held.difference(mine)),
        surplus=frozenset(held.intersection(mine) - ours),
        lost=frozenset(mine) - held,
    )


def balance(
    lanes: Mapping[Lane, str | None], members: Mapping[str, frozenset[str]]
) -> dict[Lane, str]:
    """Return an owner for each lane: shares differ by one at most, owners stay where they can."""
    load = dict.fromkeys(members, 0)
    owners: dict[Lane, str] = {}
    fair = -(-len(lanes) // len(members)) if members else 0
    quota = dict.fromkeys(sorted(members), fair)
    for name in sorted(members, reverse=True)[: fair * len(members) - len(lanes)]:
        quota[name] = fair - 1
    for lane, owner in sorted(lanes.items()):
        if owner is None or owner not in members:
            continue
        if lane.topic in members[owner] and load[owner] < quota[owner]:
            owners[lane] = owner
            load[owner] += 1
    for lane in sorted(lanes):
        willing = [name for name in members if lane.topic in members[name]]
        if lane not in owners and willing:
            owner = min(willing, key=lambda name: (load[name] >= quota[name], load[name], name))
            owners[lane] = owner
            load[owner] += 1
    return owners
