"""The schedule: which key lane's head runs now, which waits, and for what."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from holdfast.consumer.key_lane import KeyLane, State
from holdfast.consumer.pools import Pools, Turn
from holdfast.consumer.work import Work

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.consumer.gates import Gates
    from holdfast.consumer.route import Route


class Schedule:
    """Hands works to the workers through `ready`; used under the lock of the lanes.

    Suspects of a crash run apart: they wait until nothing else runs, and all others wait for
    them. At most *company* of them run at once, and a prime suspect runs alone.
    """

    def __init__(self, gates: Gates, clock: Clock, company: int) -> None:
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self.running: dict[Work, None] = {}
        self._gates = gates
        self._clock = clock
        self._pools = Pools(clock, self.ready.put)
        self._due: list[tuple[float, int, KeyLane]] = []
        self._order = itertools.count()
        self._gated: dict[KeyLane, None] = {}
        self._suspects: deque[KeyLane] = deque()
        self._stalled: deque[KeyLane] = deque()
        self._company = company
        self._tested: set[Work] = set()
        """The suspects that run; nothing else does then."""
        self.stopped = False

    # -- beginning -------------------------------------------------------------------

    def issue(self, lane: KeyLane) -> None:
        """Let the head of *lane* run if it may."""
        work = lane.queue[0]
        if self.stopped or not work.admitted:
            lane.state = State.PENDING
        elif work.not_before > self._clock.monotonic():
            self.wait(lane, work.not_before - self._clock.monotonic())
        elif work.suspect and not lane.holds:
            lane.state = State.SUSPECT
            self._suspects.append(lane)
            self.move_on()
        elif self._is_testing:
            lane.state = State.SUSPECT
            self._stalled.append(lane)
        elif work.route.batch is not None and lane.is_plain:
            self._pools.add(work.route, lane)
        else:
            self._start(lane)

    def begin_batch(self, route: Route) -> list[Work]:
        """Return what of *route* may run in one transaction now; its keys keep their order."""
        taken: list[Work] = []
        if self.stopped or self._is_testing:
            self._pools.taken(route, taken)
            return taken
        size = self._pools.room(route)
        for lane in self._pools.waiting(route):
            if lane.state is State.POOLED and lane.is_live:
                taken += self._begin_some(lane, size - len(taken))
            if len(taken) >= size:
                break
        self._pools.taken(route, taken)
        self.offer()
        return taken

    def _start(self, lane: KeyLane) -> bool:
        """Hand the head of *lane* to the workers, unless its gate is shut."""
        work = lane.queue[0]
        if not lane.holds and work.later is None and not self._gates.enter(work):
            self._gate(lane)
            return False
        lane.state = State.RUNNING
        self.running[work] = None
        self.ready.put(work)
        return True

    def _begin_some(self, lane: KeyLane, most: int) -> list[Work]:
        """Begin the works at the head of *lane* that may share a batch."""
        taken: list[Work] = []
        for work in lane.plain(most):
            if not self._gates.enter(work):
                break
            work.begun = True
            self.running[work] = None
            taken.append(work)
        if taken:
            lane.state = State.RUNNING
        elif lane.is_plain:
            self._gate(lane)
        else:
            self.issue(lane)
        return taken

    # -- ending ----------------------------------------------------------------------

    def ended(self, work: Work) -> None:
        """Note that *work* does not run any more."""
        self.running.pop(work, None)
        work.begun = False
        self._tested.discard(work)
        self._gates.left(work)

    def ended_batch(self, route: Route) -> None:
        """Note that a batch of *route* has ended."""
        self._pools.ended(route)

    def forget(self, lane: KeyLane) -> None:
        """Let *lane* wait for no gate any more: its head has gone."""
        self._gated.pop(lane, None)

    def stop(self) -> None:
        """Issue nothing more; what runs may finish."""
        self.stopped = True
        judgements = []
        with suppress(Empty):
            while True:
                item = self.ready.get_nowait()
                if isinstance(item, Work):
                    self.running.pop(item, None)
                elif not isinstance(item, Turn):
                    judgements.append(item)  # its message has run
        for item in judgements:
            self.ready.put(item)
        self._pools.forget_turns()

    # -- waiting ---------------------------------------------------------------------

    def wait(self, lane: KeyLane, delay: float) -> None:
        """Let *lane* wait for *delay* seconds."""
        lane.state = State.WAITING
        lane.due = self._clock.monotonic() + delay
        heapq.heappush(self._due, (lane.due, next(self._order), lane))

    def tick(self) -> float | None:
        """Let run what is due or no longer gated; return the seconds until more may be."""
        now = self._clock.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, lane = heapq.heappop(self._due)
            if lane.state is State.WAITING and lane.due == due and lane.is_live:
                self.issue(lane)
        self._ungate()
        moments = [self._due[0][0] - now] if self._due else []
        opening = self._gates.opens_in() if self._gated else None
        moments += [seconds for seconds in (opening, self.offer()) if seconds is not None]
        return max(min(moments), 0.0) if moments else None

    def move_on(self) -> None:
        """Run suspects once nothing else runs; then let the others go on."""
        self._ungate()
        if self.stopped:
            return
        while self._suspects:
            lane = self._suspects[0]
            if lane.state is not State.SUSPECT or not lane.is_live:
                self._suspects.popleft()
                continue
            work = lane.queue[0]
            if not self._may_test(work):
                break
            self._suspects.popleft()
            if self._start(lane):
                self._tested.add(work)
        while self._stalled and not self._is_testing:
            lane = self._stalled.popleft()
            if lane.state is State.SUSPECT and lane.is_live:
                self.issue(lane)
        self.offer()

    def offer(self) -> float | None:
        """Ask for workers for batches; return the seconds until an unfilled one goes out."""
        if self.stopped or self._is_testing:
            return None
        return self._pools.offer()

    @property
    def _is_testing(self) -> bool:
        """Whether suspects run or are about to: all others wait."""
        return bool(self._suspects or self._tested)

    def _may_test(self, work: Work) -> bool:
        """Whether the suspect *work* may run beside what runs now."""
        if work.prime or len(self.running) > len(self._tested):
            return not self.running
        return len(self._tested) < self._company and not any(one.prime for one in self._tested)

    def _gate(self, lane: KeyLane) -> None:
        lane.state = State.GATED
        self._gated[lane] = None

    def _ungate(self) -> None:
        if self._is_testing:
            return
        # Who has tried least goes first, then who has tried most: neither a few bad ones nor
        # those that always fail at first must be all that ever tries.
        lanes = sorted(self._gated, key=_tried)
        for lane in lanes[:1] + lanes[:0:-1]:
            if not lane.is_live:
                del self._gated[lane]
            elif self._gates.has_room(lane.queue[0]):
                del self._gated[lane]
                self.issue(lane)


def _tried(lane: KeyLane) -> int:
    """Return how often in a row the head of *lane* found something down."""
    return lane.queue[0].outages if lane.queue else 0
