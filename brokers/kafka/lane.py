"""What one member knows of one lane it owns: decisions only, no I/O."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

if TYPE_CHECKING:
    from holdfast.ports import Delivery, Lane

FULL, DRAINED = 200, 50
"""Backlog at which a lane stops fetching, and at which it goes on."""


@dataclass(slots=True)
class LaneState:
    """Progress of one lane under one assignment.

    `open` holds every offset handed out and not settled for good, with the receipt of its
    last handing out. Offsets enter in ascending order and a release changes the receipt in
    place, so the first key is the contiguous watermark: everything before it is settled.
    One dict serves as registry and watermark, since this is the hot path.
    """

    lane: Lane
    epoch: int
    open: dict[int, int] = field(default_factory=dict)
    backlog: list[Delivery] = field(default_factory=list)
    """Fetched or released, to be handed out before anything newer; ascending."""
    next: int | None = None
    """The offset after the last one handed out."""
    committed: int | None = None
    """What is durable on the broker, as far as this assignment knows."""
    sent: int | None = None
    """What the commit on its way will make durable."""
    moved_at: float = 0.0
    """When it came or last brought something, by the monotonic clock."""
    choked: bool = False
    """Whether fetching stopped because of the backlog."""

    def position(self, reached: int | None) -> int | None:
        """Return the lowest offset that must be read again after a crash; None if that is unknown.

        *reached* is how far the client has read: past the end of what was handed out, or with
        nothing handed out, there may be markers of transactions, which nobody settles.
        """
        if self.open:
            return next(iter(self.open))
        if self.backlog:
            return int(self.backlog[0].position)
        return self.next if reached is None else max(self.next or 0, reached)

    def launch(self, deliveries: list[Delivery]) -> None:
        """Note that *deliveries*, fetched and never handed out, are handed out now."""
        if deliveries:
            offsets = cast("list[int]", [delivery.position for delivery in deliveries])
            self.open.update(dict.fromkeys(offsets, 0))
            self.next = offsets[-1] + 1

    def relaunch(self, limit: int) -> list[Delivery]:
        """Hand out the first *limit* of the backlog."""
        batch, self.backlog = self.backlog[:limit], self.backlog[limit:]
        self.launch([d for d in batch if int(d.position) not in self.open])
        return batch

    def holds(self, delivery: Delivery) -> bool:
        """Whether *delivery* is the last handing out of an unsettled message."""
        return (
            delivery.epoch == self.epoch
            and self.open.get(int(delivery.position)) == delivery.receipt
        )

    def put_back(self, delivery: Delivery) -> None:
        """Note that *delivery* is to be handed out again, ahead of everything newer."""
        receipt = delivery.receipt + 1
        self.open[int(delivery.position)] = receipt
        insort(self.backlog, msgspec.structs.replace(delivery, receipt=receipt), key=_position)


def _position(delivery: Delivery) -> int:
    return int(delivery.position)
