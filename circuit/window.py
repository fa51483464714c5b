"""Sliding windows over the outcomes of calls, as values."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

_SLICES = 10


class LastCalls(msgspec.Struct, frozen=True, gc=False):
    """The outcomes of the last *size* calls, one bit each, the newest lowest."""

    size: int = 100
    calls: int = 0
    failed: int = 0
    slow: int = 0

    def record(self, *, failed: bool, slow: bool, now: float) -> LastCalls:
        """Return the window with one more call in it, and the oldest forgotten if it was full."""
        mask = (1 << self.size) - 1
        return LastCalls(
            self.size,
            min(self.calls + 1, self.size),
            (self.failed << 1 | failed) & mask,
            (self.slow << 1 | slow) & mask,
        )

    def count(self, now: float) -> CallCounts:
        """Return how many calls are in the window, and how they went."""
        return CallCounts(self.calls, self.failed.bit_count(), self.slow.bit_count())

    def is_steady(self) -> bool:
        """Whether one more quick success would change nothing."""
        return self.calls == self.size and not self.failed and not self.slow


class Slice(msgspec.Struct, frozen=True, gc=False):
    """What happened in one part of a time window."""

    number: int
    calls: int
    failed: int
    slow: int


class LastSeconds(msgspec.Struct, frozen=True):
    """The outcomes of the last *seconds*, kept in ten slices."""

    seconds: float = 60.0
    slices: tuple[Slice, ...] = ()

    def record(self, *, failed: bool, slow: bool, now: float) -> LastSeconds:
        """Return the window with one more call in it, and what is too old forgotten."""
        number = self._number(now)
        kept = self._kept(number)
        last = kept[-1] if kept and kept[-1].number >= number else None
        if last is None:
            return LastSeconds(self.seconds, (*kept, Slice(number, 1, failed, slow)))
        grown = Slice(last.number, last.calls + 1, last.failed + failed, last.slow + slow)
        return LastSeconds(self.seconds, (*kept[:-1], grown))

    def count(self, now: float) -> CallCounts:
        """Return how many calls are in the window, and how they went."""
        kept = self._kept(self._number(now))
        return CallCounts(
            sum(part.calls for part in kept),
            sum(part.failed for part in kept),
            sum(part.slow for part in kept),
        )

    def is_steady(self) -> bool:
        """Whether one more quick success would change nothing: never, the time goes on."""
        return False

    def _number(self, now: float) -> int:
        return int(now * _SLICES / self.seconds)

    def _kept(self, number: int) -> tuple[Slice, ...]:
        oldest = number - _SLICES
        if not self.slices or self.slices[0].number > oldest:
            return self.slices
        return tuple(part for part in self.slices if part.number > oldest)


Window: TypeAlias = LastCalls | LastSeconds


class CallCounts(msgspec.Struct, frozen=True, gc=False):
    """What a window holds."""

    calls: int
    failed: int
    slow: int
