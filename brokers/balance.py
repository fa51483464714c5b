"""Which member of a group should own which lane, where the broker does not decide it itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.ports import Lane


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
