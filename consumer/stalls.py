"""Partitions that hold messages and bring none, though nothing here keeps them back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.clock import Clock
    from holdfast.ports import Lane

log = logging.getLogger("holdfast.consumer")


class Stalls:
    """Remembers since when each partition stands still; the poll thread looks now and then.

    A client or a broker can lose a partition without a word: the consumer looks well, and its
    messages wait for ever. So they are counted from outside, by the lag.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: dict[Lane, float] = {}
        self._due: dict[Lane, float] = {}
        self.now: dict[Lane, int] = {}
        """The partitions that stand still, with the messages that wait in each."""

    def delayed(self, lane: Lane, seconds: float) -> None:
        """Note that a message of *lane* waits at the broker for *seconds*: no standstill."""
        self._due[lane] = max(self._due.get(lane, 0.0), self._clock.monotonic() + seconds)

    def look(self, lag: Mapping[Lane, int], excused: Collection[Lane], lease: float | None) -> None:
        """Find what stands still by the *lag*; *excused* is what came, is in hand or is paused.

        What a member that died had in hand comes again only when its *lease* has ended.
        """
        now = self._clock.monotonic()
        longest = max(self._seconds, 2 * (lease or 0.0))
        since, before = self._since, self.now
        self._since, self.now = {}, {}
        for lane, waiting in lag.items():
            if waiting <= 0 or lane in excused or now < self._due.get(lane, 0.0):
                continue
            self._since[lane] = since.get(lane, now)
            if now - self._since[lane] > longest:
                self.now[lane] = waiting
        for lane in self.now.keys() - before.keys():
            log.error("%s/%d stands still: %d messages wait, and none has come for %.0f s, though "
                      "nothing here keeps them back", *lane, self.now[lane],
                      now - self._since[lane])  # fmt: skip
        for lane in before.keys() - self.now.keys():
            log.warning("%s/%d goes on", *lane)

    def text(self) -> str:
        """Return what stands still, in words; empty if nothing does."""
        shown = [f"{lane.topic}/{lane.partition} ({count})" for lane, count in self.now.items()]
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        return f"messages wait and none comes: {', '.join(shown[:5])}{more}" if shown else ""
