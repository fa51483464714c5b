"""Key lanes: what may run now, so that each key keeps its order and nobody else waits for it."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.consumer.key_lane import KeyLane, State
from holdfast.consumer.schedule import Schedule
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
        company: int,
        wake: Callable[[], None],
        dropped: Callable[[Work], None],
    ) -> None:
        self._schedule = Schedule(gates, clock, company)
        self.ready = self._schedule.ready
        self._clock = clock
        self._wake = wake
        self._dropped = dropped
        self._lock = threading.RLock()
        self._lanes: dict[LaneKey, KeyLane] = {}
        self._tray = Tray()
        self.idle = threading.Condition(self._lock)
        self.load = self._tray.load

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
                    work.dropped = True
                    self._tray.came(work.delivery)
                    self._tray.give_back(work.delivery, work.lane_key, blame=False, delay=None)
                    continue
                lane = self._lanes.get(work.lane_key)
                if lane is None:
                    lane = self._lanes[work.lane_key] = KeyLane(work.lane_key)
                elif (held := lane.same(work)) is not None:
                    held.delivery, work.dropped = work.delivery, True
                    continue
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
                    self._schedule.issue(lane)
            wait = self._schedule.offer()
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
        with self._lock:
            return self._schedule.begin_batch(route)

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

    def returned(self) -> list[Returned]:
        """Return what the broker is to hand out again later, in order; its keys are closed."""
        with self._lock:
            return self._tray.returned()

    def gave_back(self, one: Returned) -> None:
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
            self.idle.notify_all()

    def forsake(self, work: Work) -> None:
        """Note that *work* is not ours any more: whatever comes of it here is not settled.

        It comes again, here or elsewhere, so what stands behind it of its key goes back.
        """
        with self._lock:
            lane = self._lanes.get(work.lane_key)
            if work.dropped or work.delivery is None or lane is None:
                return
            behind = list(lane.queue)[lane.queue.index(work) + 1 :]
            for one in behind:
                if one.delivery is not None and one not in self._schedule.running:
                    self._tray.give_back(one.delivery, lane.key, blame=False, delay=None)
                    self._discard(lane, [one])
            work.dropped = True
            self._tray.went(work.delivery)
            if work not in self._schedule.running:
                self._discard(lane, [work])
                self._schedule.forget(lane)
                self._next(lane)

    def stop(self) -> None:
        """Issue nothing more; what runs may finish."""
        with self._lock:
            self._schedule.stop()
            self.idle.notify_all()

    # -- looking ---------------------------------------------------------------------

    def running(self, lanes: Collection[Lane] | None = None) -> list[Work]:
        """Return what runs now, of all or of some *lanes*."""
        with self._lock:
            return [
                work
                for work in self._schedule.running
                if work.begun
                and (lanes is None or (work.delivery is not None and work.delivery.lane in lanes))
            ]

    def in_hand(self) -> list[Work]:
        """Return everything that is not finished."""
        with self._lock:
            return [work for lane in self._lanes.values() for work in lane.queue]

    def suspects(self) -> int:
        """Return how many messages in hand may have ended a process."""
        return sum(work.suspect for work in self.in_hand())

    def has(self, key: LaneKey) -> bool:
        """Whether anything of *key* is in hand."""
        with self._lock:
            return key in self._lanes

    def is_empty(self) -> bool:
        """Whether nothing is in hand and nothing waits to be acknowledged."""
        with self._lock:
            return not self._lanes and not self._tray

    # -- inside the lock -------------------------------------------------------------

    def _finish(self, verdicts: Collection[tuple[Work, Verdict]], route: Route | None) -> None:
        with self._lock:
            if route is not None:
                self._schedule.ended_batch(route)
            ended: dict[KeyLane, float | None] = {}
            for work, verdict in verdicts:
                self._schedule.ended(work)
                lane = self._lanes[work.lane_key]
                delay = self._conclude(lane, work, verdict)
                if ended.get(lane) is None:
                    ended[lane] = delay
            for lane, delay in ended.items():
                if delay is None or not lane.queue:
                    self._next(lane)
                else:
                    self._schedule.wait(lane, delay)
            self._schedule.move_on()
            self.idle.notify_all()
        self._wake()

    def _conclude(self, lane: KeyLane, work: Work, verdict: Verdict) -> float | None:
        """Do what *verdict* says about *work*; return the seconds that its lane is to wait."""
        if not work.dropped and not self._schedule.stopped:
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
                self._tray.give_back(
                    one.delivery, lane.key, blame=mine, delay=delay if mine else None
                )
        self._dropped_all(lane, work)

    def _dropped_all(self, lane: KeyLane, but: Work) -> None:
        for one in [other for other in lane.queue if other is not but]:
            one.dropped = True
            lane.queue.remove(one)
            self._dropped(one)

    def _forget(self, gone: Collection[Lane], *, begun: bool) -> None:
        for lane in list(self._lanes.values()):
            mine = [
                work
                for work in lane.queue
                if work.delivery and work.delivery.lane in gone and (begun or not work.begun)
            ]
            self._discard(lane, mine)
            if mine and not (lane.queue and lane.queue[0] in self._schedule.running):
                self._schedule.forget(lane)
                self._next(lane)

    def _discard(self, lane: KeyLane, works: list[Work]) -> None:
        for work in works:
            work.dropped = True
            if work not in self._schedule.running:
                lane.queue.remove(work)
                self._dropped(work)
            elif work.task is not None:
                work.task()

    def _next(self, lane: KeyLane) -> None:
        if not lane.queue:
            self._lanes.pop(lane.key, None)
            lane.state, lane.is_gone = State.PENDING, True
        elif lane.queue[0] not in self._schedule.running:
            self._schedule.issue(lane)
