"""The run queue: the heads of keys that run now and those that wait; mechanics, no decisions."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from holdfast.consumer.scheduling.batches import Batcher, BatchReady
from holdfast.consumer.scheduling.eligibility import Turn, asks_circuits, may_be_tested, turn
from holdfast.consumer.scheduling.key_queue import KeyQueue, State
from holdfast.consumer.scheduling.work import Work

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.circuit_gate import CircuitGate

_NOW, _BATCHED = Turn.NOW, Turn.BATCHED  # bound once: each message asks


class RunQueue:
    """Hands works to the workers through `ready`; used under the lock of the lanes.

    Suspects of a crash run apart: they wait until nothing else runs, and all others wait for
    them. At most *company* of them run at once, and a prime suspect runs alone.
    """

    def __init__(self, gates: CircuitGate, clock: Clock, company: int) -> None:
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self.running: dict[Work, None] = {}
        self._gates = gates
        self._clock = clock
        self._pools = Batcher(clock, self.ready.put)
        self._due: list[tuple[float, int, KeyQueue]] = []
        self._order = itertools.count()
        self._gated: dict[KeyQueue, None] = {}
        self._suspects: deque[KeyQueue] = deque()
        self._stalled: deque[KeyQueue] = deque()
        self._company = company
        self._tested: set[Work] = set()
        """The suspects that run; nothing else does then."""
        self.stopped = False

    # -- beginning -------------------------------------------------------------------

    def issue(self, lane: KeyQueue) -> None:
        """Let the head of *lane* run if it may."""
        if self.stopped:
            lane.state = State.PENDING
            return
        work, now = lane.queue[0], self._clock.monotonic()
        found = turn(work, key_held=lane.holds, now=now, testing=self._is_testing)
        if found is _NOW:
            self._start(lane)
        elif found is _BATCHED:
            self._pools.add(work.route, lane)
        elif found is Turn.NOT_YET:
            lane.state = State.PENDING
        elif found is Turn.LATER:
            self.wait(lane, work.not_before - now)
        elif found is Turn.TESTED:
            lane.state = State.SUSPECT
            self._suspects.append(lane)
            self.move_on()
        else:
            lane.state = State.SUSPECT
            self._stalled.append(lane)

    def begin_batch(self, route: Route) -> list[Work]:
        """Return what of *route* may run in one transaction now; its keys keep their order."""
        taken: list[Work] = []
        if self.stopped or self._is_testing:
            self._pools.taken(route, taken)
            return taken
        size, is_free = self._pools.room(route), self._gates.is_free(route)
        for lane in self._pools.waiting(route):
            if lane.state is State.POOLED and lane.is_live:
                taken += self._begin_some(lane, size - len(taken), is_free=is_free)
            if len(taken) >= size:
                break
        self._pools.taken(route, taken)
        self.offer()
        return taken

    def _start(self, lane: KeyQueue) -> bool:
        """Hand the head of *lane* to the workers, unless its gate is shut."""
        work = lane.queue[0]
        if asks_circuits(work, key_held=lane.holds) and not self._gates.enter(work):
            self._gate(lane)
            return False
        lane.state = State.RUNNING
        self.running[work] = None
        self.ready.put(work)
        return True

    def _begin_some(self, lane: KeyQueue, most: int, *, is_free: bool) -> list[Work]:
        """Begin the works at the head of *lane* that may share a batch; *is_free*: no gate asks."""
        taken: list[Work] = []
        for work in lane.plain(most):
            if not is_free and not self._gates.enter(work):
                break
            work.begin()
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
        work.end()
        if self._tested:
            self._tested.discard(work)
        self._gates.left(work)

    def ended_batch(self, route: Route) -> None:
        """Note that a batch of *route* has ended."""
        self._pools.ended(route)

    def forget(self, lane: KeyQueue) -> None:
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
                elif not isinstance(item, BatchReady):
                    judgements.append(item)  # its message has run
        for item in judgements:
            self.ready.put(item)
        self._pools.forget_turns()

    # -- waiting ---------------------------------------------------------------------

    def wait(self, lane: KeyQueue, delay: float) -> None:
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
            others = len(self.running) - len(self._tested)
            if not may_be_tested(work, others=others, tested=self._tested, company=self._company):
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

    def _gate(self, lane: KeyQueue) -> None:
        lane.state = State.GATED
        self._gated[lane] = None

    def _ungate(self) -> None:
        if not self._gated or self._is_testing:
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


def _tried(lane: KeyQueue) -> int:
    """Return how often in a row the head of *lane* found something down."""
    return lane.queue[0].history.outages if lane.queue else 0
