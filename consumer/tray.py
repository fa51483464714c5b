"""The tray: what is done with and not yet acknowledged, and how much of each partition is here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.ports import Delivery, Lane


@dataclass(frozen=True, slots=True)
class Returned:
    """A delivery that the broker is to hand out again."""

    delivery: Delivery
    blame: bool = field(kw_only=True)
    delay: float | None = field(kw_only=True)


class Tray:
    """Counts deliveries in and out by partition; used under the lock of the lanes."""

    def __init__(self) -> None:
        self.load: Counter[Lane] = Counter()
        """Messages in hand by the partition they came from."""
        self._settled: list[Delivery] = []
        self._returned: list[Returned] = []

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

    def give_back(self, delivery: Delivery, *, blame: bool, delay: float | None) -> None:
        """Keep one that is to be handed out again later."""
        self._returned.append(Returned(delivery, blame=blame, delay=delay))

    def take_returned(self) -> list[Returned]:
        """Return what is to be given back to the broker, each once."""
        returned, self._returned = self._returned, []
        for one in returned:
            self.went(one.delivery)
        return returned

    def put_back_returned(self, returned: list[Returned]) -> None:
        """Keep *returned* for the next try."""
        self._returned[:0] = returned
        for one in returned:
            self.came(one.delivery)

    def drop(self, lanes: Collection[Lane]) -> None:
        """Forget everything of *lanes*."""
        self._settled = [d for d in self._settled if d.lane not in lanes]
        self._returned = [one for one in self._returned if one.delivery.lane not in lanes]
        for lane in lanes:
            self.load.pop(lane, None)

    def __bool__(self) -> bool:
        """Whether anything waits to be acknowledged or given back."""
        return bool(self._settled or self._returned)
