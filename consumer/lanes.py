"""Key lanes: what may run now, so that each key keeps its order and nobody else waits for it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from holdfast.consumer.key_lane import KeyLane, State
from holdfast.consumer.pools import Pools, Turn
from holdfast.consumer.tray import Returned, Tray
from holdfast.consumer.work import Apart, Delayed, LaneKey, Settled, Verdict, Wait, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from holdfast.clock import Clock
    from holdfast.consumer.gates import Gates
    from holdfast.consumer.route import Route
    from holdfast.ports import Delivery, Lane


class Lanes:
    """The scheduler: any thread may call it, and no call does I/O.

    Workers take from `ready`; what they report with `finish` lets the next message of that
    key run at once, without the poll thread. What is settled is collected for it.
    """

    def __init__(
        self,
        gates: Gates,
        clock: Clock,
        *,
        wake: Callable[[], None],
        dropped: Callable[[Work], None],
    ) -> None:
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self._gates = gates
        self._clock = clock
        self._wake = wake
        self._dropped = dropped
        self._lock = threading.RLock()
        self._lanes: dict[LaneKey, KeyLane] = {}
        self._tray = Tray()
        self._pools = Pools(clock, self.ready.put)
        self._due: list[tuple[float, int, KeyLane]] = []
        self._order = itertools.count()
        self._gated: dict[KeyLane, None] = {}
        self._suspects: deque[KeyLane] = deque()
        self._stalled: deque[KeyLane] = deque()
        self._running: dict[Work, None] = {}
        self._alone = False
        self._stopped = False
        self.idle = threading.Condition(self._lock)
        self.load = self._tray.load

    # -- coming in -------------------------------------------------------------------

    def reserve(self, works: Iterable[Work]) -> None:
        """Queue *works*; each runs once it is admitted and its turn comes."""
        with self._lock:
            for work in works:
                lane = self._lanes.get(work.lane_key)
                if lane is None:
                    lane = self._lanes[work.lane_key] = KeyLane(work.lane_key)
                lane.queue.append(work)
                if work.delivery is not None:
                    self._tray.came(work.delivery)

    def admit(self, works: Iterable[Work], held: Collection[LaneKey] = ()) -> None:
        """Let *works* run; those of *held* keys are parked behind what is held."""
        with self._lock:
            for work in works:
                work.admitted = True
                lane = self._lanes.get(work.lane_key)
                if lane is None:
                    continue
                if work.lane_key in held:
                    lane.holds = True
                if lane.state is State.PENDING and lane.queue and lane.queue[0] is work:
                    self._issue(lane)
            wait = self._offer()
        if wait is not None:
            self._wake()

    # -- running ---------------------------------------------------------------------

    def begin(self, work: Work) -> bool:
        """Whether a thread that took *work* may run it; not once its lane has gone."""
        with self._lock:
            work.begun = not work.dropped
            return work.begun

    def begin_batch(self, route: Route) -> list[Work]:
        """Return what of *route* may run in one transaction now; its keys keep their order."""
        taken: list[Work] = []
        with self._lock:
            if self._stopped or self._suspects or self._alone:
                self._pools.taken(route, taken)
                return taken
            size = self._pools.room(route)
            for lane in self._pools.waiting(route):
                if lane.state is State.POOLED and self._is_live(lane):
                    taken += self._begin_some(lane, size - len(taken))
                if len(taken) >= size:
                    break
            self._pools.taken(route, taken)
            self._offer()
            return taken

    def finish(self, work: Work, verdict: Verdict) -> None:
        """Take the *verdict* on a work that ran."""
        self._finish([(work, verdict)], None)

    def finish_batch(self, route: Route, verdicts: Collection[tuple[Work, Verdict]]) -> None:
        """Take the verdicts on a batch of *route*, in the order in which it was taken."""
        self._finish(verdicts, route)

    def is_held(self, work: Work) -> bool:
        """Whether *work* is to be parked behind an earlier message of its key."""
        with self._lock:
            lane = self._lanes.get(work.lane_key)
            return lane is not None and lane.holds

    def unhold(self, work: Work) -> None:
        """Note that nothing of the key of *work* is held any more."""
        with self._lock:
            if lane := self._lanes.get(work.lane_key):
                lane.holds = False

    def tick(self) -> float | None:
        """Let run what is due or no longer gated; return the seconds until more may be."""
        with self._lock:
            now = self._clock.monotonic()
            while self._due and self._due[0][0] <= now:
                due, _, lane = heapq.heappop(self._due)
                if lane.state is State.WAITING and lane.due == due and self._is_live(lane):
                    self._issue(lane)
            self._ungate()
            moments = [self._due[0][0] - now] if self._due else []
            if self._gated:
                moments += [seconds for seconds in (self._gates.opens_in(),) if seconds is not None]
            moments += [seconds for seconds in (self._offer(),) if seconds is not None]
            return max(min(moments), 0.0) if moments else None

    # -- going out -------------------------------------------------------------------

    def take_settled(self) -> list[Delivery]:
        """Return what may be acknowledged now, each once."""
        with self._lock:
            return self._tray.take()

    def put_back_settled(self, deliveries: list[Delivery]) -> None:
        """Keep *deliveries* for the next try: the broker did not take the word."""
        with self._lock:
            self._tray.put_back(deliveries)

    def take_returned(self) -> list[Returned]:
        """Return what the broker is to hand out again later, each once."""
        with self._lock:
            return self._tray.take_returned()

    def put_back_returned(self, returned: list[Returned]) -> None:
        """Keep *returned* for the next try: the broker did not take them."""
        with self._lock:
            self._tray.put_back_returned(returned)

    def waiting_lanes(self) -> set[Lane]:
        """Return the partitions of tiers of which a message in hand is not due yet."""
        now = self._clock.monotonic()
        return {
            work.delivery.lane
            for work in self.in_hand()
            if work.not_before > now and work.delivery is not None
        }

    def freeze(self, lanes: Collection[Lane]) -> None:
        """Forget what of *lanes* does not run; what runs may finish and be settled."""
        with self._lock:
            self._forget(set(lanes), begun=False)

    def drop(self, lanes: Collection[Lane]) -> None:
        """Forget everything of *lanes* that does not run; what runs is not settled any more."""
        gone = set(lanes)
        with self._lock:
            self._forget(gone, begun=True)
            self._tray.drop(gone)
            self._move_on()
            self.idle.notify_all()

    def forsake(self, work: Work) -> None:
        """Note that somebody else has *work*: whatever comes of it here is not settled."""
        with self._lock:
            if not work.dropped and work.delivery is not None:
                work.dropped = True
                self._tray.went(work.delivery)

    def stop(self) -> None:
        """Issue nothing more; what runs may finish."""
        with self._lock:
            self._stopped = True
            judgements = []
            with suppress(Empty):
                while True:
                    item = self.ready.get_nowait()
                    if isinstance(item, Work):
                        self._running.pop(item, None)
                    elif not isinstance(item, Turn):
                        judgements.append(item)  # its message has run
            for item in judgements:
                self.ready.put(item)
            self._pools.forget_turns()
            self.idle.notify_all()

    # -- looking ---------------------------------------------------------------------

    def running(self, lanes: Collection[Lane] | None = None) -> list[Work]:
        """Return what runs now, of all or of some *lanes*."""
        with self._lock:
            return [
                work
                for work in self._running
                if work.begun
                and (lanes is None or (work.delivery is not None and work.delivery.lane in lanes))
            ]

    def in_hand(self) -> list[Work]:
        """Return everything that is not finished."""
        with self._lock:
            return [work for lane in self._lanes.values() for work in lane.queue]

    def has(self, key: LaneKey) -> bool:
        """Whether anything of *key* is in hand."""
        with self._lock:
            return key in self._lanes

    def is_empty(self) -> bool:
        """Whether nothing is in hand and nothing waits to be acknowledged."""
        with self._lock:
            return not self._lanes and not self._tray

    # -- inside the lock -------------------------------------------------------------

    def _issue(self, lane: KeyLane) -> None:
        """Let the head of *lane* run if it may."""
        work = lane.queue[0]
        if self._stopped or not work.admitted:
            lane.state = State.PENDING
        elif work.not_before > self._clock.monotonic():
            self._wait(lane, work.not_before - self._clock.monotonic())
        elif work.suspect and not lane.holds:
            lane.state = State.SUSPECT
            self._suspects.append(lane)
            self._move_on()
        elif self._suspects or self._alone:
            lane.state = State.SUSPECT
            self._stalled.append(lane)
        elif work.route.batch is not None and lane.is_plain:
            self._pools.add(work.route, lane)
        else:
            self._start(lane)

    def _start(self, lane: KeyLane) -> bool:
        """Hand the head of *lane* to the workers, unless its gate is shut."""
        work = lane.queue[0]
        if not lane.holds and work.later is None and not self._gates.enter(work):
            lane.state = State.GATED
            self._gated[lane] = None
            return False
        lane.state = State.RUNNING
        self._running[work] = None
        self.ready.put(work)
        return True

    def _begin_some(self, lane: KeyLane, most: int) -> list[Work]:
        """Begin the works at the head of *lane* that may share a batch."""
        taken: list[Work] = []
        for work in lane.plain(most):
            if not self._gates.enter(work):
                break
            work.begun = True
            self._running[work] = None
            taken.append(work)
        if taken:
            lane.state = State.RUNNING
        elif lane.is_plain:
            lane.state = State.GATED
            self._gated[lane] = None
        else:
            self._issue(lane)
        return taken

    def _finish(self, verdicts: Collection[tuple[Work, Verdict]], route: Route | None) -> None:
        with self._lock:
            if route is not None:
                self._pools.ended(route)
            self._alone = False
            ended: dict[KeyLane, float | None] = {}
            for work, verdict in verdicts:
                self._running.pop(work, None)
                work.begun = False
                self._gates.left(work)
                lane = self._lanes[work.lane_key]
                delay = self._conclude(lane, work, verdict)
                if ended.get(lane) is None:
                    ended[lane] = delay
            for lane, delay in ended.items():
                if delay is None or not lane.queue:
                    self._next(lane)
                else:
                    self._wait(lane, delay)
            self._move_on()
            self.idle.notify_all()
        self._wake()

    def _conclude(self, lane: KeyLane, work: Work, verdict: Verdict) -> float | None:
        """Do what *verdict* says about *work*; return the seconds that its lane is to wait."""
        if not work.dropped and not self._stopped:
            if isinstance(verdict, Wait):
                return verdict.delay
            if isinstance(verdict, Apart):
                work.single = work.single or verdict.single
                return None
        if isinstance(verdict, Delayed) and not work.dropped:
            self._return(lane, work, verdict.delay)
        elif isinstance(verdict, Settled) and not work.dropped:
            lane.holds = lane.holds or verdict.holds
            if work.delivery is not None:
                self._tray.settle(work.delivery)
            elif verdict.holds:  # the rest of a parked key waits on in the database
                self._discard(lane, [one for one in lane.queue if one is not work])
        elif work.delivery is not None and not work.dropped:
            self._tray.went(work.delivery)
        with suppress(ValueError):
            lane.queue.remove(work)
        return None

    def _return(self, lane: KeyLane, work: Work, delay: float) -> None:
        """Give *work* back to the broker for *delay*, and what stands behind it with it."""
        for one in [work, *(other for other in lane.queue if other is not work)]:
            if one.delivery is not None:
                mine = one is work
                self._tray.give_back(one.delivery, blame=mine, delay=delay if mine else None)
        self._dropped_all(lane, work)

    def _dropped_all(self, lane: KeyLane, but: Work) -> None:
        for one in [other for other in lane.queue if other is not but]:
            one.dropped = True
            lane.queue.remove(one)
            self._dropped(one)

    def _wait(self, lane: KeyLane, delay: float) -> None:
        lane.state = State.WAITING
        lane.due = self._clock.monotonic() + delay
        heapq.heappush(self._due, (lane.due, next(self._order), lane))

    def _is_live(self, lane: KeyLane) -> bool:
        return bool(lane.queue) and self._lanes.get(lane.key) is lane

    def _forget(self, gone: Collection[Lane], *, begun: bool) -> None:
        for lane in list(self._lanes.values()):
            mine = [
                work
                for work in lane.queue
                if work.delivery and work.delivery.lane in gone and (begun or not work.begun)
            ]
            self._discard(lane, mine)
            if mine and not (lane.queue and lane.queue[0] in self._running):
                self._gated.pop(lane, None)
                self._next(lane)

    def _discard(self, lane: KeyLane, works: list[Work]) -> None:
        for work in works:
            work.dropped = True
            if work not in self._running:
                lane.queue.remove(work)
                self._dropped(work)
            elif work.task is not None:
                work.task()

    def _next(self, lane: KeyLane) -> None:
        if not lane.queue:
            self._lanes.pop(lane.key, None)
            lane.state = State.PENDING
        elif lane.queue[0] not in self._running:
            self._issue(lane)

    def _move_on(self) -> None:
        """Run a suspect once nothing else runs; then let the others go on."""
        self._ungate()
        if self._stopped:
            return
        while self._suspects and not self._running:
            lane = self._suspects.popleft()
            if lane.state is State.SUSPECT and self._is_live(lane):
                self._alone = self._start(lane)
        while self._stalled and not (self._suspects or self._alone):
            lane = self._stalled.popleft()
            if lane.state is State.SUSPECT and self._is_live(lane):
                self._issue(lane)
        self._offer()

    def _offer(self) -> float | None:
        """Ask for workers for batches; return the seconds until an unfilled one goes out."""
        if self._stopped or self._suspects or self._alone:
            return None
        return self._pools.offer()

    def _ungate(self) -> None:
        if self._suspects or self._alone:
            return
        for lane in list(self._gated):
            if not self._is_live(lane):
                del self._gated[lane]
            elif self._gates.has_room(lane.queue[0]):
                del self._gated[lane]
                self._issue(lane)
