"""What the adapters' sources have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from holdfast.brokers.groups.member import State
from holdfast.errors import ConfigurationError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from holdfast.brokers.groups.member import OwnedLanes
    from holdfast.ports import Lane, Position


class GroupSource(Generic[State]):
    """A member of a group that can be paused lane by lane, and that ends once."""

    def __init__(self, owned: OwnedLanes[State]) -> None:
        self._owned = owned
        self._lanes = owned.lanes
        self._paused: set[Lane] = set()
        self._is_closed = False

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Hand out nothing from *lanes*, whoever assigns them anew."""
        self._paused.update(lanes)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Hand out from *lanes* again."""
        self._paused.difference_update(lanes)

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes owned now."""
        return self._owned.assignment()

    def _open(self) -> None:
        """Refuse to be used after `close`."""
        if self._is_closed:
            raise Unsupported("be used after close()", "this source", "make a new one")

    def _sought(self, lane: Lane, offset: Position | None, time: datetime | None) -> State:
        """Return the lane in which to seek, unless it is not ours or the aim is not clear."""
        state = self._lanes.get(lane)
        if state is None:
            raise ConfigurationError(
                f"cannot seek in {lane}: it is not assigned to this member; owned now: "
                f"{sorted(self._lanes) or 'nothing, poll first'}"
            )
        if (offset is None) == (time is None):
            raise ConfigurationError("seek takes either offset= or time=, one of them")
        return state
