"""The poller: the only thread that uses the source, and never waits for a handler."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from holdfast.consumer.monitoring import LagAges
from holdfast.dlq.metrics import METRICS
from holdfast.errors import BrokerDown, HoldfastError, StaleDelivery
from holdfast.headers import REPLAY_GROUP
from holdfast.ports import Pause
from holdfast.scrubbing import text_of
from holdfast.tracing import switch
from holdfast.tracing.messaging import MESSAGING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from holdfast.clock import Clock
    from holdfast.consumer.intake.admission import Admission
    from holdfast.consumer.intake.decode import MessageDecoder
    from holdfast.consumer.scheduling.circuit_gate import CircuitGate
    from holdfast.consumer.scheduling.scheduler import KeyScheduler
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.message import Message
    from holdfast.ports import Delivery, Lane, Source


log = logging.getLogger("holdfast.consumer")
_POLL_SECONDS = 1.0
_LAG_EVERY = 5.0
_HANG_EVERY = 0.5


class Poller:
    """Polls, hands over, settles. It is also the listener that hears of rebalances.

    Messages are acknowledged here and nowhere else, after their transaction has committed.
    """

    def __init__(
        self,
        context: ConsumerContext,
        intake: MessageDecoder,
        lanes: KeyScheduler,
        gates: CircuitGate,
        admission: Admission | None,
        *,
        watches_lag: bool,
    ) -> None:
        self._group = context.group
        self._system = context.system
        self._intake = intake
        self._lanes = lanes
        self._gates = gates
        self._admission = admission
        self._watches_lag = watches_lag
        self._settings = settings = context.settings
        sizes = [r.batch.batches.size for r in intake.routes.values() if r.batch is not None]
        self._most = max(settings.batch, min(2 * max(sizes, default=0), settings.backlog))
        """Messages polled at a time: while one batch runs, the next one comes as a whole."""
        self._clock = clock = context.clock
        self._counters = context.counters
        self._metrics = context.metrics
        self._source: Source | None = None
        self._paused: set[Lane] = set()
        self._next_lag = self._next_hang = 0.0
        self._lag_every = min(_LAG_EVERY, settings.standstill_seconds / 4)
        self._ages = LagAges()
        self._came: set[Lane] = set()
        self.stalls = StallDetector(clock, settings.standstill_seconds)
        self._foreign: set[str] = set()
        self._drained = False
        self.stopping = threading.Event()
        self.hurry = threading.Event()
        self.last_poll = self.pulse = clock.monotonic()
        """When it last polled, and when it last did anything at all, an outage included."""
        self.hanging_threads = self.hanging_tasks = 0
        """How many `def` and `async def` handlers have run longer than `hang_seconds`."""
        self.subscribed = False
        self.broker_down: str | None = None
        self.fatal: BaseException | None = None
        """What ended the run."""
        lanes.listen(self.wake)

    @property
    def database_down(self) -> str | None:
        """Why the database cannot be used, None while it can or there is none."""
        return None if self._admission is None else self._admission.down

    def fail(self, error: BaseException) -> None:
        """End the run in good order, because of *error*. Any thread may call it."""
        self.fatal = error
        self.stop()

    def stop(self, *, at_once: bool = False) -> None:
        """End the run in good order, however often asked; or *at_once*, without what runs."""
        if at_once:
            self.hurry.set()
        self.stopping.set()
        self.wake()

    def wake(self) -> None:
        """End the wait of the poll thread."""
        source = self._source
        if source is not None:
            source.wake()

    @property
    def source(self) -> Source:
        """The source in use."""
        assert self._source is not None  # noqa: S101
        return self._source

    def attach(self, source: Source) -> None:
        """Use *source* from now on."""
        self._source = source

    # -- one round ---------------------------------------------------------------------

    def step(self, timeout: float = _POLL_SECONDS) -> int:
        """Poll once, hand over what came, settle what is done; return how much came."""
        source = self.source
        self.pulse = self._clock.monotonic()
        wait = self._lanes.tick()
        if source.caps.lease is not None:  # they are looked after between two polls
            timeout = min(timeout, source.caps.lease / 4)
        try:
            self._apply_pauses(source)
            began, start = time.time_ns(), self._clock.monotonic()
            with switch.quiet():
                batch = source.poll(self._most, timeout if wait is None else min(wait, timeout))
            if batch:
                MESSAGING.received(self._system, self._group, _topics(batch),
                                   self._clock.monotonic() - start)  # fmt: skip
                if switch.spans is not None:
                    self._trace("receive", "receive", batch, began)
            self.last_poll = self.pulse = self._clock.monotonic()
            self.subscribed = True
            if batch and not self.stopping.is_set():
                self._came.update([delivery.lane for delivery in batch])
                self._take(batch)
            self._lanes.tick()
            self.settle()
            self._keep_leases(source)
            self._look_around(source)
        except BrokerDown as error:
            self._broker_is_down(error)
            return 0
        if self.broker_down is not None:
            log.warning("the broker answers again")
            self.broker_down = None
        return len(batch)

    def settle(self) -> None:
        """Tell the broker what is done with, and what it is to hand out again later."""
        source = self._source
        if source is None:
            return
        self._give_back(source)
        settled = self._lanes.take_settled()
        if not settled:
            return
        began = time.time_ns()
        try:
            with switch.quiet(), self._timed("ack", settled):
                source.accept(settled)
            if switch.spans is not None:
                self._trace("ack", "settle", settled, began)
            METRICS.consumed.labels(self._group).inc(len(settled))
        except StaleDelivery:
            log.info("some of %d messages belong to others now", len(settled))
        except HoldfastError:
            self._lanes.put_back_settled(settled)
            raise

    def _give_back(self, source: Source) -> None:
        """Give back what waits on the broker; a key stays closed until all of it is there."""
        for one in self._lanes.returned():
            began = time.time_ns()
            with switch.quiet(), self._timed("nack", [one.delivery]):
                source.release(one.delivery, blame=one.blame, delay=one.delay)
            if switch.spans is not None:
                self._trace("nack", "settle", [one.delivery], began)
            self.stalls.delayed(one.delivery.lane, one.delay or 0.0)
            self._lanes.gave_back(one)

    @contextmanager
    def _timed(self, name: str, deliveries: list[Delivery]) -> Iterator[None]:
        """Note how long the broker takes to hear of *deliveries*, and whether it fails to."""
        start, failure = self._clock.monotonic(), None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            MESSAGING.settled(name, self._system, self._group, _topics(deliveries),
                              self._clock.monotonic() - start, failure)  # fmt: skip

    def _trace(self, name: str, kind: str, deliveries: list[Delivery], began: int) -> None:
        assert switch.spans is not None  # noqa: S101
        switch.spans.transferred(
            name, kind, self._system, self._group,
            _readable(deliveries), began,
        )  # fmt: skip

    def drain(self, seconds: float) -> None:
        """Take nothing new; let what runs finish for at most *seconds*, and settle it."""
        self.stopping.set()
        self._lanes.stop()
        until = self._clock.monotonic() + seconds
        while self._lanes.running() and self._clock.monotonic() < until:
            if self.hurry.is_set():
                break
            self.step(0.2)
        left = self._lanes.running()
        self._drained = True  # whoever is not ready by now is not waited for again
        if left:
            log.error(
                "%d handlers did not finish in time, their messages are not acknowledged: %s",
                len(left), ", ".join(work.message.id for work in left[:10]),
            )  # fmt: skip
        try:
            self.settle()
            if self._source is not None:
                self._source.flush()
        except HoldfastError as error:
            log.warning("not everything could be acknowledged, it comes again: %s", error)

    def _take(self, batch: list[Delivery]) -> None:
        works, skipped = self._intake.sorted_out(batch, self.source)
        if skipped:
            self._passed_over(skipped)
            self._lanes.put_back_settled(skipped)
        if works:
            self._lanes.reserve(works)
            if self._admission is None:
                self._lanes.admit(works)
            else:
                self._admission.admit(works)

    def _passed_over(self, skipped: list[Delivery]) -> None:
        """Say once for each topic that messages are acknowledged without being handled here."""
        for delivery in skipped:
            topic = delivery.lane.topic
            self._counters.add(topic, "skipped")
            if topic not in self._foreign:
                self._foreign.add(topic)
                log.warning("message %s of %s, and others from now on, are replays for group %s "
                            "alone: %s passes them over", delivery.message.id, topic,
                            delivery.message.headers.text(REPLAY_GROUP), self._group)  # fmt: skip

    # -- pauses, leases, hangs -----------------------------------------------------------

    def _apply_pauses(self, source: Source) -> None:
        owned = source.assignment()
        if self.stopping.is_set() or self.database_down is not None:
            wanted = set(owned)
        else:
            shut = {route.topic for route in self._gates.shut(self._lanes.in_hand)}
            early = self._lanes.waiting_lanes() if self._intake.has_tiers else set()
            wanted = {
                lane for lane in owned if self._is_full(lane) or lane.topic in shut or lane in early
            }
        if source.caps.pause is Pause.NONE:
            return
        if new := wanted - self._paused:
            source.pause(new)
        if gone := self._paused - wanted:
            source.resume(gone)
        self._paused = wanted
        self._metrics.paused.set(len(wanted))

    def _is_full(self, lane: Lane) -> bool:
        """Whether *lane* has enough in hand; once paused it stays so until half is done."""
        bound = self._settings.backlog
        return self._lanes.load[lane] >= (bound // 2 if lane in self._paused else bound)

    def _keep_leases(self, source: Source) -> None:
        lease = source.caps.lease
        if lease is None:
            return
        soon = self._clock.monotonic() + lease / 2
        lost = False
        for work in self._lanes.in_hand():
            delivery = work.delivery
            if delivery is None or delivery.lease_until is None or delivery.lease_until > soon:
                continue  # nearly always: so this is asked first
            if work.is_revoked:
                continue
            try:
                source.extend(delivery, lease)
            except StaleDelivery:
                self._lanes.forsake(work)
                lost = True
                log.warning("the lease of message %s has run out: it comes again", work.message.id)
        if lost:
            self._give_back(source)

    def _look_around(self, source: Source) -> None:
        now = self._clock.monotonic()
        if now >= self._next_hang:
            self._look_for_hanging(now)
        if now >= self._next_lag:
            self._look_at_lag(source, now)

    def _look_for_hanging(self, now: float) -> None:
        limit = self._settings.hang_seconds
        self._next_hang = now + min(_HANG_EVERY, limit / 4)
        hanging = self._lanes.running_since(now - limit)
        self._metrics.hanging.set(len(hanging))
        self.hanging_threads = sum(not work.route.plan.is_async for work in hanging)
        self.hanging_tasks = len(hanging) - self.hanging_threads
        for work in hanging:
            if now - work.run.reported > limit:
                work.run.reported = now
                log.error(
                    "the handler of message %s (key %r of %s) has been running for %.0f s; its key "
                    "waits, others go on. Bound what it calls, e.g. by @timeout and remaining()",
                    work.message.id, work.message.key_text, work.route.topic,
                    now - work.run.started,
                )  # fmt: skip

    def _look_at_lag(self, source: Source, now: float) -> None:
        self._next_lag = now + self._lag_every
        lag = source.lag()
        ages = self._ages.look(lag, self._lanes.in_hand(), self._clock.now().timestamp())
        self._metrics.show_lag(lag, ages, self._intake.routes)
        if self._watches_lag:
            in_hand = {lane for lane in lag if self._lanes.load[lane]}
            self.stalls.look(lag, self._came | self._paused | in_hand, source.caps.lease)
            self._metrics.stalled.set(len(self.stalls.now))
        self._came.clear()

    def _broker_is_down(self, error: BrokerDown) -> None:
        if self.broker_down is None:
            log.error("the broker is down, nothing is acknowledged until it answers: %s",
                      text_of(error))  # fmt: skip
        self.broker_down = text_of(error)
        self._clock.wait(self.hurry if self.stopping.is_set() else self.stopping, 0.5)

    # -- the listener ------------------------------------------------------------------

    def assigned(self, lanes: Iterable[Lane]) -> None:
        """Take over *lanes*."""
        log.info("assigned: %s", sorted(lanes))

    def revoked(self, lanes: Iterable[Lane]) -> None:
        """Finish what runs of *lanes* within a bound, settle it, and let the rest go."""
        gone = set(lanes)
        self._lanes.freeze(gone)
        patience = 0.0 if self._drained else self._settings.revoke_seconds
        self._lanes.wait_for(gone, self._clock.monotonic() + patience)
        try:
            self.settle()
        except HoldfastError as error:
            log.warning("what was done of %s comes again: %s", sorted(gone), error)
        self._lanes.drop(gone)

    def lost(self, lanes: Iterable[Lane]) -> None:
        """Drop the work of *lanes*: they belong to somebody else already."""
        self._lanes.drop(set(lanes))


class StallDetector:
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
        since: dict[Lane, float] = {}
        standing: dict[Lane, int] = {}
        for lane, waiting in lag.items():
            if waiting <= 0 or lane in excused or now < self._due.get(lane, 0.0):
                continue
            since[lane] = self._since.get(lane, now)
            if now - since[lane] > longest:
                standing[lane] = waiting
        # Whole, in one step: probes ask from other threads, and must not see it half done.
        before, self._since, self.now = self.now, since, standing
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


def _topics(deliveries: list[Delivery]) -> list[str]:
    return [one.lane.topic for one in deliveries]


def _readable(deliveries: list[Delivery]) -> Iterator[tuple[str, Message]]:
    """Yield what can be traced: what cannot even be read is told by its dead letter."""
    for one in deliveries:
        with suppress(HoldfastError, ValueError):
            yield one.lane.topic, one.message
