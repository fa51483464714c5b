"""Key lanes: what may run now, so that each key keeps its order and nobody else waits for it.

The tray: what is done with and not yet acknowledged, and how much of each partition is here.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from holdfast.consumer.scheduling.key_queue import KeyQueue, State
from holdfast.consumer.scheduling.run_queue import RunQueue
from holdfast.consumer.scheduling.work import (
    ACK,
    Ack,
    Disposition,
    LaneKey,
    Redeliver,
    RetryIn,
    RunAlone,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.circuit_gate import CircuitGate
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.ports import Delivery, Lane


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedDelivery:
    """A delivery that the broker is to hand out again."""

    delivery: Delivery
    lane_key: LaneKey
    blame: bool = field(kw_only=True)
    delay: float | None = field(kw_only=True)


class AckBuffer:
    """Counts deliveries in and out by partition; used under the lock of the lanes."""

    def __init__(self) -> None:
        self.load: Counter[Lane] = Counter()
        """Messages in hand by the partition they came from."""
        self._settled: list[Delivery] = []
        self._returned: dict[ReturnedDelivery, None] = {}
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
        self._returned[ReturnedDelivery(delivery, lane_key, blame=blame, delay=delay)] = None
        self._closed[lane_key] += 1

    def is_closed(self, lane_key: LaneKey) -> bool:
        """Whether a message of *lane_key* is still on its way back to the broker."""
        return lane_key in self._closed

    def returned(self) -> list[ReturnedDelivery]:
        """Return what is to be given back to the broker, in order."""
        return list(self._returned)

    def gave_back(self, one: ReturnedDelivery) -> None:
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

    def _open(self, one: ReturnedDelivery) -> None:
        self._closed[one.lane_key] -= 1
        if not self._closed[one.lane_key]:
            del self._closed[one.lane_key]


class KeyScheduler:
    """The scheduler: any thread may call it, and no call does I/O.

    Workers take from `ready`; what they report with `finish` lets the next message of that
    key run at once, without the poll thread. What is settled is collected for it.
    """

    def __init__(self, context: ConsumerContext, gates: CircuitGate) -> None:
        self._schedule = RunQueue(gates, context.clock, context.settings.workers)
        self.ready = self._schedule.ready
        self._clock = context.clock
        self._wake: Callable[[], None] = lambda: None
        self.finished: SimpleQueue[Work] = SimpleQueue()
        """What does not run any more and whose start mark may go, where starts are marked."""
        self._marks = context.store is not None
        self._lock = threading.RLock()
        self._lanes: dict[LaneKey, KeyQueue] = {}
        self._tray = AckBuffer()
        self._ended = threading.Condition(self._lock)
        self._waiters = 0
        self.load = self._tray.load

    def listen(self, wake: Callable[[], None]) -> None:
        """Call *wake* whenever there is something to settle, or to wait for."""
        self._wake = wake

    # -- coming in -------------------------------------------------------------------

    def reserve(self, works: Iterable[Work]) -> None:
        """Queue *works*; each runs once it is admitted and its turn comes.

        What was polled while an earlier message of its key is on its way back to the broker
        goes back behind that one, or it would overtake it. A message that comes again while
        it is in hand, its lease having run out, keeps its place under the new delivery.
        """
        with self._lock:
            for work in works:
                if work.delivery is not None and self._tray.is_closed(work.lane_key):
                    work.revoke()
                    self._tray.came(work.delivery)
                    self._tray.give_back(work.delivery, work.lane_key, blame=False, delay=None)
                    continue
                lane = self._lanes.get(work.lane_key)
                if lane is None:
                    lane = self._lanes[work.lane_key] = KeyQueue(work.lane_key)
                elif (held := lane.same(work)) is not None:
                    held.delivery = work.delivery
                    work.revoke()
                    continue
                lane.queue.append(work)
                if work.delivery is not None:
                    self._tray.came(work.delivery)

    def admit(self, works: Iterable[Work], held: Collection[LaneKey] = ()) -> None:
        """Let *works* run; those of *held* keys are parked behind what is held."""
        with self._lock:
            for work in works:
                work.admit()
                lane = self._lanes.get(work.lane_key)
                if lane is None:
                    continue
                if work.lane_key in held:
                    lane.holds = True
                if lane.state is State.PENDING and lane.queue and lane.queue[0] is work:
                    self._schedule.issue(lane)
            wait = self._schedule.offer()
        if wait is not None:
            self._wake()

    # -- running ---------------------------------------------------------------------

    def begin(self, work: Work) -> bool:
        """Whether a thread that took *work* may run it; not once its lane has gone."""
        with self._lock:
            return work.begin()

    def begin_batch(self, route: Route) -> list[Work]:
        """Return what of *route* may run in one transaction now; its keys keep their order."""
        with self._lock:
            return self._schedule.begin_batch(route)

    def finish(self, work: Work, step: Disposition) -> None:
        """Take the *step* on a work that ran."""
        self._finish([(work, step)], None)

    def finish_batch(self, route: Route, steps: Collection[tuple[Work, Disposition]]) -> None:
        """Take the steps on a batch of *route*, in the order in which it was taken."""
        self._finish(steps, route)

    def unmark(self, work: Work) -> None:
        """Have the start mark of *work* removed, soon."""
        if self._marks:
            self.finished.put(work)

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
            return self._schedule.tick()

    # -- going out -------------------------------------------------------------------

    def take_settled(self) -> list[Delivery]:
        """Return what may be acknowledged now, each once."""
        with self._lock:
            return self._tray.take()

    def put_back_settled(self, deliveries: list[Delivery]) -> None:
        """Keep *deliveries* for the next try: the broker did not take the word."""
        with self._lock:
            self._tray.put_back(deliveries)

    def returned(self) -> list[ReturnedDelivery]:
        """Return what the broker is to hand out again later, in order; its keys are closed."""
        with self._lock:
            return self._tray.returned()

    def gave_back(self, one: ReturnedDelivery) -> None:
        """Note that the broker has *one* again: its key is open once all of it is back."""
        with self._lock:
            self._tray.gave_back(one)

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
            self._schedule.move_on()
            self._ended.notify_all()

    def forsake(self, work: Work) -> None:
        """Note that *work* is not ours any more: whatever comes of it here is not settled.

        It comes again, here or elsewhere, so what stands behind it of its key goes back.
        """
        with self._lock:
            lane = self._lanes.get(work.lane_key)
            if work.is_revoked or work.delivery is None or lane is None or work not in lane.queue:
                return  # it was done with meanwhile
            behind = list(lane.queue)[lane.queue.index(work) + 1 :]
            for one in behind:
                if one.delivery is not None and one not in self._schedule.running:
                    self._tray.give_back(one.delivery, lane.key, blame=False, delay=None)
                    self._discard(lane, [one])
            work.revoke()
            self._tray.went(work.delivery)
            if work not in self._schedule.running:
                self._discard(lane, [work])
                self._schedule.forget(lane)
                self._next(lane)

    def stop(self) -> None:
        """Issue nothing more; what runs may finish."""
        with self._lock:
            self._schedule.stop()
            self._ended.notify_all()

    # -- looking ---------------------------------------------------------------------

    def running(self, lanes: Collection[Lane] | None = None) -> list[Work]:
        """Return what runs now, of all or of some *lanes*."""
        with self._lock:
            return [
                work
                for work in self._schedule.running
                if work.is_running
                and (lanes is None or (work.delivery is not None and work.delivery.lane in lanes))
            ]

    def wait_for(self, lanes: Collection[Lane], until: float) -> None:
        """Wait until nothing of *lanes* runs, or *until* a moment of the monotonic clock."""
        with self._lock:
            self._waiters += 1
            try:
                while self.running(lanes) and (left := until - self._clock.monotonic()) > 0:
                    self._ended.wait(min(left, 0.5))
            finally:
                self._waiters -= 1

    def running_since(self, moment: float) -> list[Work]:
        """Return what has run since before *moment*, by the monotonic clock."""
        with self._lock:
            return [
                work
                for work in self._schedule.running
                if work.run.started < moment and work.is_running
            ]

    def in_hand(self) -> list[Work]:
        """Return everything that is not finished."""
        with self._lock:
            return [work for lane in self._lanes.values() for work in lane.queue]

    def suspects(self) -> int:
        """Return how many messages in hand may have ended a process."""
        return sum(work.history.crash_suspect for work in self.in_hand())

    def has(self, key: LaneKey) -> bool:
        """Whether anything of *key* is in hand."""
        with self._lock:
            return key in self._lanes

    def is_empty(self) -> bool:
        """Whether nothing is in hand and nothing waits to be acknowledged."""
        with self._lock:
            return not self._lanes and not self._tray

    # -- inside the lock -------------------------------------------------------------

    def _finish(self, steps: Collection[tuple[Work, Disposition]], route: Route | None) -> None:
        with self._lock:
            if route is not None:
                self._schedule.ended_batch(route)
            ended: dict[KeyQueue, float | None] = {}
            for work, step in steps:
                lane = self._lanes[work.lane_key]
                self._schedule.ended(work)
                if (
                    step is ACK
                    and not work.is_revoked
                    and work.delivery is not None
                    and lane.queue[0] is work
                ):  # as nearly every message
                    self._tray.settle(work.delivery)
                    lane.queue.popleft()
                    delay = None
                else:
                    delay = self._conclude(lane, work, step)
                if ended.get(lane) is None:
                    ended[lane] = delay
            for lane, delay in ended.items():
                if delay is None or not lane.queue:
                    self._next(lane)
                else:
                    self._schedule.wait(lane, delay)
            self._schedule.move_on()
            if self._waiters:  # hardly ever, and each message comes by
                self._ended.notify_all()
        self._wake()

    def _conclude(self, lane: KeyQueue, work: Work, step: Disposition) -> float | None:
        """Do what *step* says about *work*; return the seconds that its lane is to wait."""
        is_ours = not work.is_revoked
        if is_ours and not self._schedule.stopped:
            if isinstance(step, RetryIn):
                return step.delay
            if isinstance(step, RunAlone):
                if step.failed:
                    work.note(failed_in_batch=True)
                return None
        if isinstance(step, (RetryIn, RunAlone)):
            self.unmark(work)  # it was taken away, or it is too late: it does not run again here
        if isinstance(step, Redeliver) and is_ours:
            self._return(lane, work, step.delay)
        elif isinstance(step, Ack) and is_ours:
            lane.holds = lane.holds or step.holds
            if work.delivery is not None:
                self._tray.settle(work.delivery)
            elif step.holds:  # the rest of a parked key waits on in the database
                self._discard(lane, [one for one in lane.queue if one is not work])
        elif work.delivery is not None and is_ours:
            self._tray.went(work.delivery)
        with suppress(ValueError):
            lane.queue.remove(work)
        return None

    def _return(self, lane: KeyQueue, work: Work, delay: float) -> None:
        """Give *work* back to the broker for *delay*, and what stands behind it with it."""
        for one in [work, *(other for other in lane.queue if other is not work)]:
            if one.delivery is not None:
                mine = one is work
                self._tray.give_back(
                    one.delivery, lane.key, blame=mine, delay=delay if mine else None
                )
        self._dropped_all(lane, work)

    def _dropped_all(self, lane: KeyQueue, but: Work) -> None:
        for one in [other for other in lane.queue if other is not but]:
            one.revoke()
            lane.queue.remove(one)
            self.unmark(one)

    def _forget(self, gone: Collection[Lane], *, begun: bool) -> None:
        for lane in list(self._lanes.values()):
            mine = [
                work
                for work in lane.queue
                if work.delivery and work.delivery.lane in gone and (begun or not work.is_running)
            ]
            self._discard(lane, mine)
            if mine and not (lane.queue and lane.queue[0] in self._schedule.running):
                self._schedule.forget(lane)
                self._next(lane)

    def _discard(self, lane: KeyQueue, works: list[Work]) -> None:
        for work in works:
            work.revoke()
            if work not in self._schedule.running:
                lane.queue.remove(work)
                self.unmark(work)
            elif work.run.cancel is not None:
                work.run.cancel()

    def _next(self, lane: KeyQueue) -> None:
        if not lane.queue:
            self._lanes.pop(lane.key, None)
            lane.state, lane.is_gone = State.PENDING, True
        elif lane.queue[0] not in self._schedule.running:
            self._schedule.issue(lane)
