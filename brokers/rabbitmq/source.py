"""A member of a group on RabbitMQ."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.brokers.groups.member import OwnedLanes
from holdfast.brokers.groups.source import GroupSource
from holdfast.brokers.rabbitmq.connection import PollWatchdog
from holdfast.brokers.rabbitmq.group import Assignment
from holdfast.brokers.rabbitmq.lane import DelayQueues, LaneConsumer
from holdfast.errors import BrokerDown, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.rabbitmq.connection import Reconnector
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock, Randomness
    from holdfast.ports import Delivery, Lane, Listener

_NOT_READY = 0.2


class RabbitSource(GroupSource[LaneConsumer]):
    """Hands out the messages of the lanes it owns, and settles them one by one.

    The connection has a thread of its own, so a slow caller does not lose it; lanes change
    hands only inside `poll` and `close`. A lane stays with its owner until that closes,
    dies, or has not polled for `session` seconds.
    """

    def __init__(
        self,
        line: Reconnector,
        topics: Sequence[str],
        group: str,
        settings: RabbitSettings,
        clock: Clock,
        randomness: Randomness,
        listener: Listener | None,
    ) -> None:
        super().__init__(OwnedLanes(listener))
        self.caps = settings.caps()
        self.group = group
        self._line = line
        self._topics = tuple(dict.fromkeys(topics))
        self._settings = settings
        self._clock = clock
        self._random = randomness
        self._ready = threading.Event()
        self._woken = threading.Event()
        self._has_lost_settles = False
        self._turn = 0
        self._polled = clock.monotonic()
        try:
            self._assignment = self._connect(settings.patience)
        except BaseException:
            line.close()
            raise

    # -- handing out -----------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, each lane's in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        while True:
            self._ready.clear()
            self._polled = now = self._clock.monotonic()
            if not self._assignment.link.is_alive:
                self._reconnect(max(until - now, 0.0))
            patience = self._assignment.attend()
            if batch := self._hand_out(limit):
                return batch
            left = until - self._clock.monotonic()
            if left <= 0 or self._woken.is_set():
                self._woken.clear()
                return []
            self._clock.wait(self._ready, min(left, patience))

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._woken.set()
        self._ready.set()

    def _notice(self) -> None:
        """Let a poll that waits look again; called in the link's thread, per message."""
        if not self._ready.is_set():
            self._ready.set()

    def _hand_out(self, limit: int) -> list[Delivery]:
        inlets = [i for lane, i in self._lanes.items() if lane not in self._paused]
        if not inlets:
            return []
        self._turn = (self._turn + 1) % len(inlets)
        batch: list[Delivery] = []
        for inlet in inlets[self._turn :] + inlets[: self._turn]:
            batch += inlet.take(limit - len(batch))
        return batch

    # -- settling --------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* as done; those that are ours no more are passed over."""
        tags: dict[int, list[int]] = {inlet.epoch: [] for inlet in self._lanes.values()}
        for delivery in deliveries:
            if (some := tags.get(delivery.epoch)) is not None:
                some.append(delivery.receipt[0])
        for inlet in self._lanes.values():
            if some := tags[inlet.epoch]:
                inlet.accept(some)

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused; a dead-letter policy of the operator's applies to it."""
        if (inlet := self._inlet(delivery)) is not None:
            inlet.refuse(delivery.receipt[0], requeue=False)

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again; the broker counts that whether there is *blame* or not."""
        del blame
        if delay is not None and delay > (self.caps.delay or 0.0):
            raise Unsupported(f"delay a release by {delay} s", "RabbitMQ", "at most 28 days")
        inlet = self._inlet(delivery)
        if inlet is None:
            return
        tag = delivery.receipt[0]
        if delay is None or delay <= 0:
            inlet.refuse(tag, requeue=True)
            return
        safe_from = self._delays.put(delivery, inlet.queue, delay)
        if safe_from <= self._clock.monotonic():
            inlet.accept([tag])
        else:  # until then the original is the only copy that is certain to survive
            inlet.deferred[tag] = safe_from

    def _inlet(self, delivery: Delivery) -> LaneConsumer | None:
        """Return where *delivery* can be settled; None if it is ours no more."""
        inlet = self._lanes.get(delivery.lane)
        if inlet is None or inlet.epoch != delivery.epoch:
            return None
        return inlet if inlet.is_ours(delivery.receipt[0]) else None

    def flush(self) -> None:
        """Return once all that was settled is safe; `BrokerDown` if some of it was lost."""
        if self._has_lost_settles or self._assignment.has_lost_settles:
            self._has_lost_settles = self._assignment.has_lost_settles = False
            raise BrokerDown("the connection was lost before the last accepts were safe")
        if not self._is_closed:
            self._assignment.flush(list(self._lanes))

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Refuse: a delivery stays with its owner."""
        raise Unsupported("extend a delivery", "RabbitMQ", "it has no lease that could run out")

    def seek(
        self, lane: Lane, *, offset: int | str | None = None, time: datetime | None = None
    ) -> None:
        """Refuse: a queue forgets what was settled."""
        raise Unsupported("seek", "RabbitMQ", "its queues keep nothing that was settled")

    # -- the group -------------------------------------------------------------------

    def held(self, lane: Lane) -> int:
        """Return how many messages of *lane* are here, handed out or not."""
        inlet = self._lanes.get(lane)
        return 0 if inlet is None else inlet.held

    def lag(self) -> Mapping[Lane, int]:
        """Return what waits in the queue of each owned lane, and what is here unsettled."""
        control = self._assignment.topology.control
        owned = list(self._lanes.items())
        answers = [control.ask("queue_declare", queue=i.queue, passive=True) for _, i in owned]
        patience = self._settings.patience
        return {
            lane: answer.get(self._clock, patience, "the lag").message_count + inlet.held
            for (lane, inlet), answer in zip(owned, answers, strict=True)
        }

    def close(self) -> None:
        """Leave the group: what is not settled goes back to its place in the queues."""
        if self._is_closed:
            return
        self._is_closed = True
        assignment = self._assignment
        try:
            if assignment.link.is_alive:
                assignment.give_up(self._lanes)
            else:
                assignment.lose(self._lanes)
        finally:
            self._owned.remove(list(self._lanes))
            self._line.close()

    # -- the connection --------------------------------------------------------------

    def _connect(self, within: float) -> Assignment:
        """Connect and set up the group on the broker; the lanes come with the polls."""
        link = self._line.link(within, self._woken)
        assignment = Assignment(
            link,
            self.group,
            self._topics,
            self._settings,
            self._clock,
            self._random,
            self._owned,
            self._notice,
        )
        self._delays = DelayQueues(link, assignment.topology, self._settings, self._clock)
        link.post(
            PollWatchdog(link, self._settings.session, self._clock, lambda: self._polled).look
        )
        return assignment

    def _reconnect(self, within: float) -> None:
        old = self._assignment
        old.lose(self._lanes)
        self._has_lost_settles |= old.has_lost_settles
        try:
            self._assignment = self._connect(within)
        except BrokerDown:
            # Reached, but not ready: let a caller that asks again at once not do it in a spin.
            self._clock.wait(self._woken, min(within, _NOT_READY))
            raise
