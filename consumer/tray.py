"""The tray: what is done with and not yet acknowledged, and how much of each partition is here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.consumer.work import LaneKey
    from holdfast.ports import Delivery, Lane


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """A delivery that the broker is to hand out again."""

    delivery: Delivery
    lane_key: LaneKey
    blame: bool = field(kw_only=True)
    delay: float | None = field(kw_only=True)


class Tray:
    """Counts deliveries in and out by partition; used under the lock of the lanes."""

    def __init__(self) -> None:
        self.load: Counter[Lane] = Counter()
        """Messages in hand by the partition they came from."""
        self._settled: list[Delivery] = []
        self._returned: dict[Returned, None] = {}
        self._closed: Counter[LaneKey] = Counter()
        """The keys of what is to be given back, with how many: nothing of them may run."""

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

    def give_back(
        self, delivery: Delivery, lane_key: LaneKey, *, blame: bool, delay: float | None
    ) -> None:
        """Keep one that is to be handed out again later; it is in hand until the broker has it."""
        self._returned[Returned(delivery, lane_key, blame=blame, delay=delay)] = None
        self._closed[lane_key] += 1

    def is_closed(self, lane_key: LaneKey) -> bool:
        """Whether a message of *lane_key* is still on its way back to the broker."""
        return lane_key in self._closed

    def returned(self) -> list[Returned]:
        """Return what is to be given back to the broker, in order."""
        return list(self._returned)

    def gave_back(self, one: Returned) -> None:
        """Note that the broker has *one* again."""
        if one in self._returned:  # not where its partition went meanwhile
            del self._returned[one]
            self._open(one)
            self.went(one.delivery)

    def drop(self, lanes: Collection[Lane]) -> None:
        """Forget everything of *lanes*."""
        self._settled = [d for d in self._settled if d.lane not in lanes]
        for one in [one for one in self._returned if one.delivery.lane in lanes]:
            del self._returned[one]
            self._open(one)
        for lane in lanes:
            self.load.pop(lane, None)

    def __bool__(self) -> bool:
        """Whether anything waits to be acknowledged or given back."""
        return bool(self._settled or self._returned)

    def _open(self, one: Returned) -> None:
        self._closed[one.lane_key] -= 1
        if not self._closed[one.lane_key]:
            del self._closed[one.lane_key]
