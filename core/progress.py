"""How far a consumer group is: what a broker tells at one moment, by lane."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.ports import Lane, Position


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneProgress:
    """How far one group is in one lane."""

    unsettled: int
    """Messages that are kept and not yet settled; gaps between offsets may count."""
    committed: Position | None = None
    """Where a new member would go on: everything before it is settled. None where the broker
    has no positions, or the group has settled nothing yet."""
    end: Position | None = None
    """Where the next message goes; where positions are no plain numbers, the last message."""
    oldest: float | None = None
    """When the oldest unsettled message was stored, in POSIX seconds; None where that is not
    told, or nothing is unsettled."""
    deleted: int = 0
    """Messages that the broker deleted before the group had settled them, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a group is in its topics."""

    lanes: Mapping[Lane, LaneProgress]
    members: Mapping[str, int] = field(default_factory=dict)
    """How many members read each topic now; a topic that is missing here is not told."""
    retention: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a topic keeps messages, settled or not; one that is missing here keeps them
    until they are settled, or the broker does not tell."""
