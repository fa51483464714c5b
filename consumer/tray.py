"""The tray: what is done with and not yet acknowledged, and how much of each partition is here."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.ports import Delivery, Lane


class Tray:
    """Counts deliveries in and out by partition; used under the lock of the lanes."""

    def __init__(self) -> None:
        self.load: Counter[Lane] = Counter()
        """Messages in hand by the partition they came from."""
        self._settled: list[Delivery] = []

    def came(self, delivery: Delivery) -> None:
        """Count one that came."""
        self.load[delivery.lane] += 1

    def went(self, delivery: Delivery) -> None:
        """Count one that has gone."""
        if self.load[delivery.lane] > 0:
            self.load[delivery.lane] -= 1

    def settle(self, delivery: Delivery) -> None:
        """Keep one that may be acknowledged; it is in hand until it is taken."""
        self._settled.append(delivery)

    def take(self) -> list[Delivery]:
        """Return what may be acknowledged, each once."""
        settled, self._settled = self._settled, []
        for delivery in settled:
            self.went(delivery)
        return settled

    def put_back(self, deliveries: list[Delivery]) -> None:
        """Keep *deliveries* for the next try."""
        self._settled[:0] = deliveries
        for delivery in deliveries:
            self.came(delivery)

    def drop(self, lanes: Collection[Lane]) -> None:
        """Forget everything of *lanes*."""
        self._settled = [d for d in self._settled if d.lane not in lanes]
        for lane in lanes:
            self.load.pop(lane, None)

    def __bool__(self) -> bool:
        """Whether anything waits to be acknowledged."""
        return bool(self._settled)
