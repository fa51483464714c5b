"""Partitions that stand still, as probes see them from other threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.consumer.intake.poller import StallDetector
from holdfast.ports import Lane
from holdfast.testing import VirtualClock

if TYPE_CHECKING:
    from collections.abc import ItemsView

FIRST, SECOND = Lane("orders", 0), Lane("orders", 1)


class Watched(dict[Lane, int]):
    """A lag that asks the detector while it looks, as a probe of another thread may."""

    def __init__(self, detector: StallDetector, lag: dict[Lane, int]) -> None:
        super().__init__(lag)
        self.seen: list[str] = []
        self._detector = detector

    def items(self) -> ItemsView[Lane, int]:
        for lane, waiting in super().items():
            self.seen.append(self._detector.text())
            yield lane, waiting  # type: ignore[misc]


def test_what_stands_still_is_told_without_a_gap_while_the_detector_looks_again() -> None:
    """A probe is not ready all the while, and never meets a set that changes under its hands."""
    clock = VirtualClock()
    detector = StallDetector(clock, seconds=1.0)
    lag = {FIRST: 2, SECOND: 3}
    detector.look(lag, set(), None)
    clock.advance(2.0)
    detector.look(lag, set(), None)
    told = detector.text()
    assert told == "messages wait and none comes: orders/0 (2), orders/1 (3)"
    before, again = detector.now, Watched(detector, lag)
    detector.look(again, set(), None)
    assert again.seen == [told, told]
    assert detector.now is not before


def test_what_goes_on_is_told_no_more() -> None:
    """What came, is in hand or is paused is excused."""
    clock = VirtualClock()
    detector = StallDetector(clock, seconds=1.0)
    for _ in range(2):
        detector.look({FIRST: 1}, set(), None)
        clock.advance(2.0)
    assert FIRST in detector.now
    detector.look({FIRST: 1}, {FIRST}, None)
    assert (detector.now, detector.text()) == ({}, "")
