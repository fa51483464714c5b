"""Pools: key lanes of batched handlers that wait for company, and when they go out together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.consumer.scheduling.key_queue import KeyQueue, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.clock import Clock
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import Batches

_COMPANY = 0.25
"""Seconds that an unfilled batch waits for one that runs: by then it is full, or that one hangs."""


@dataclass(frozen=True, slots=True)
class BatchReady:
    """A worker may take the next batch of *route*."""

    route: Route


class BatchQueue:
    """The lanes of one handler whose heads may run."""

    __slots__ = ("asked", "batches", "lanes", "running", "since")

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.lanes: dict[KeyQueue, None] = {}
        self.since = 0.0
        self.asked = False
        """Whether a worker has been asked to take a batch, and has not yet."""
        self.running = 0

    def is_full(self) -> bool:
        """Whether a whole batch waits."""
        size, found, rough = self.batches.size, 0, 0
        # Counted roughly first: each message that comes asks, and most often too few are here.
        for lane in self.lanes:
            rough += len(lane.queue)
            if rough >= size:
                break
        else:
            return False
        for lane in self.lanes:
            found += lane.plain_count(size - found)
            if found >= size:
                return True
        return False

    def due(self) -> float:
        """Return when an unfilled batch goes out, by the monotonic clock."""
        return self.since + self.batches.wait + (_COMPANY if self.running else 0.0)


class Batcher:
    """All pools of a consumer; used under the lock of the lanes."""

    def __init__(self, clock: Clock, ask: Callable[[BatchReady], None]) -> None:
        self._clock = clock
        self._ask = ask
        self._pools: dict[Route, BatchQueue] = {}

    def add(self, route: Route, lane: KeyQueue) -> None:
        """Let the head of *lane* wait for company."""
        assert route.batch is not None  # noqa: S101 - asked by the caller
        pool = self._pools.get(route)
        if pool is None:
            pool = self._pools[route] = BatchQueue(route.batch.batches)
        if not pool.lanes:
            pool.since = self._clock.monotonic()
        lane.state = State.POOLED
        pool.lanes[lane] = None

    def offer(self) -> float | None:
        """Ask for workers where a batch is full or due; return the seconds until one will be."""
        soonest: float | None = None
        for route, pool in self._pools.items():
            if pool.asked or not pool.lanes:
                continue
            left = pool.due() - self._clock.monotonic()
            if left <= 0 or pool.is_full():
                pool.asked = True
                self._ask(BatchReady(route))
            elif soonest is None or left < soonest:
                soonest = left
        return soonest

    def waiting(self, route: Route) -> Iterable[KeyQueue]:
        """Return the lanes of *route* that wait, each taken out as it is handed over."""
        pool = self._pools[route]
        for lane in list(pool.lanes):
            del pool.lanes[lane]
            yield lane

    def room(self, route: Route) -> int:
        """Return how many messages go into a batch of *route*."""
        return self._pools[route].batches.size

    def taken(self, route: Route, works: list[Work]) -> None:
        """Note that a worker came, and went with *works*."""
        pool = self._pools[route]
        pool.asked = False
        pool.since = self._clock.monotonic()
        pool.running += bool(works)

    def ended(self, route: Route) -> None:
        """Note that a batch of *route* has ended."""
        self._pools[route].running -= 1

    def forget_turns(self) -> None:
        """Note that no worker will come."""
        for pool in self._pools.values():
            pool.asked = False
