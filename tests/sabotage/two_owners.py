"""Break a promise: every member takes every lane, owned or not."""

from typing import Any

from holdfast.brokers.embedded.group import EmbeddedGroup
from holdfast.brokers.groups import assignment

owners = EmbeddedGroup._owners


def greedy(self: Any, db: Any, members: Any) -> Any:
    """Show every lane that is not ours as free."""
    found = owners(self, db, members)
    return {
        lane: (lane_id, owner if owner == self.member else None)
        for lane, (lane_id, owner) in found.items()
    }


EmbeddedGroup._owners = greedy  # type: ignore[method-assign]
assignment.balance = lambda lanes, members: {
    lane: (min(members) if owner is None else owner) for lane, owner in lanes.items()
}
