"""The kit fits logs that settle cumulatively and can do little else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers import connect
from holdfast.errors import Unsupported
from holdfast.ports import Counts, Pause, Settle
from holdfast.testing import VirtualClock
from holdfast.testing.conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane, Listener, Source

SESSION = 3.0


class LogBroker:
    """As Kafka has it: one committed position per lane, and no count, delay, lease or pause."""

    name = "log"

    def __init__(self, clock: Clock) -> None:
        self.wrapped: Any = connect("memory:", clock=clock, lease=10**6, session=SESSION)
        self.caps = replace(
            self.wrapped.caps,
            settle=Settle.CUMULATIVE,
            counts=Counts.NONE,
            blameless_release=False,
            release_keeps_order=False,
            delay=None,
            lease=None,
            pause=Pause.NONE,
            max_message=None,
            replay=False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def source(
        self, topics: Sequence[str], *, group: str, listener: Listener | None = None
    ) -> Source:
        """Return a source that settles by watermark."""
        return LogSource(self, self.wrapped.source(topics, group=group, listener=listener))

    def abandon(self, source: Any) -> None:
        """Abandon the wrapped source."""
        self.wrapped.abandon(source.wrapped)


class LogSource:
    """Commits what lies below the first unfinished message, and nothing above."""

    def __init__(self, broker: LogBroker, wrapped: Any) -> None:
        self.caps = broker.caps
        self.wrapped = wrapped
        self._open: dict[tuple[Lane, int], set[int]] = {}
        self._held: list[Delivery] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Poll, and forget what a log does not know."""
        got: list[Delivery] = self.wrapped.poll(limit, timeout)
        for delivery in got:
            delivery.count = delivery.lease_until = None
            of_lane = self._open.setdefault((delivery.lane, delivery.epoch), set())
            of_lane.add(int(delivery.position))
        self._held += got
        return got

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Commit the contiguous part."""
        for delivery in deliveries:
            self._open[delivery.lane, delivery.epoch].discard(int(delivery.position))
        self.wrapped.accept([d for d in self._held if self._is_below(d)])

    def _is_below(self, delivery: Delivery) -> bool:
        unfinished = self._open[delivery.lane, delivery.epoch]
        return not unfinished or int(delivery.position) < min(unfinished)

    def reject(self, delivery: Delivery) -> None:
        """Count as done: the log has no dead letters."""
        self.accept([delivery])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Read it again."""
        if delay is not None:
            raise Unsupported("delay a release", "log")
        self.wrapped.release(delivery, blame=False)

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Refuse."""
        raise Unsupported("extend", "log")

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Refuse."""
        raise Unsupported("pause", "log")

    def seek(self, lane: Lane, **to: Any) -> None:
        """Refuse."""
        raise Unsupported("seek", "log")


class TestLog(BrokerConformance):
    """Every promise of the port, where nearly nothing is declared."""

    session = SESSION

    def abandon(self, broker: Any, source: Source) -> None:
        """Let the broker itself do it."""
        broker.abandon(source)

    @pytest.fixture
    def broker(self) -> LogBroker:
        """Return the log on a virtual clock."""
        self.clock = VirtualClock(auto=True)
        return LogBroker(self.clock)
