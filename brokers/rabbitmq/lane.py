"""Releasing a message for later.

One lane's channel: how a member claims the lane, gets its messages and settles them.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.brokers.rabbitmq import names
from holdfast.brokers.rabbitmq.confirms import ConfirmChannel, Outgoing, await_batch
from holdfast.brokers.rabbitmq.connection import Reply
from holdfast.brokers.rabbitmq.errors import ChannelRefused, QueueNotFound, closed
from holdfast.brokers.rabbitmq.pika_internals import close_without_cancelling
from holdfast.brokers.rabbitmq.settings import CONTENT
from holdfast.brokers.rabbitmq.wire import (
    Incoming,
    content_identity,
    content_of,
    full,
    postponed,
)
from holdfast.errors import BrokerDown, HoldfastError
from holdfast.ids import new_id
from holdfast.ports import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.brokers.rabbitmq.connection import ConnectionThread
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.brokers.rabbitmq.topology import Topology
    from holdfast.clock import Clock
    from holdfast.ports import Lane


class DelayQueues:
    """Puts copies of messages where they wait; the caller settles the original after that.

    A crash in between leaves both: the message comes twice, and is never lost.
    """

    def __init__(
        self, link: ConnectionThread, topology: Topology, settings: RabbitSettings, clock: Clock
    ) -> None:
        self._link = link
        self._topology = topology
        self._settings = settings
        self._clock = clock
        self._outlet: ConfirmChannel | None = None

    def put(self, delivery: Delivery, queue: str, seconds: float) -> float:
        """Return once a copy of *delivery* is stored that enters *queue* after *seconds*.

        What is returned is the moment from which a server that is killed keeps the copy.
        """
        if self._outlet is None or not self._outlet.is_usable:
            self._outlet = ConfirmChannel(self._link)
        _, original = delivery.receipt
        position = str(delivery.position)
        properties = postponed(original, position, delivery.count or 1)
        exchange, safe_from = self._topology.delay(seconds)
        batch = self._outlet.send(
            [Outgoing(exchange, queue, properties, delivery.body or b"", position)]
        )
        try:
            await_batch(batch, self._link, self._clock, self._settings.patience)
        except (QueueNotFound, ChannelRefused) as error:
            self._topology.forget_delays()
            raise BrokerDown(f"the queue of this delay was deleted meanwhile: {error}") from error
        if batch.refused:
            self._topology.forget_delays()
            raise BrokerDown(f"RabbitMQ could not store the message in {exchange!r}")
        return safe_from


_log = logging.getLogger("holdfast.brokers.rabbitmq")


class ConsumerPhase(Enum):
    """Where a claim has got to."""

    ASKED = "asked"
    OWNED = "owned"
    TAKEN = "taken"
    GONE = "gone"


class LaneConsumer:
    """A claim to one lane and, once it is granted, the lane's deliveries.

    Who owns a lane is alone on its tally of owners: two that come at once see each other
    and both step back. The broker lets only one consumer of the lane's queue be active, so
    even a member that errs about this gets nothing that another one has. Claim, deliveries
    and settling share one channel: they end together, and what was not settled is the next
    owner's, in order.
    """

    def __init__(
        self,
        link: ConnectionThread,
        lane: Lane,
        group: str,
        epoch: int,
        settings: RabbitSettings,
        notify: Callable[[], None],
    ) -> None:
        self.lane = lane
        self.epoch = epoch
        self.stage = ConsumerPhase.ASKED
        self.failure: HoldfastError | None = None
        self.queue = names.lane_queue(lane.topic, group, lane.partition)
        self.arrived: deque[tuple[Any, Any, bytes]] = deque()
        self.unsettled: dict[int, None] = {}
        """Tags handed out, in order; all tags that have only arrived are higher."""
        self.deferred: dict[int, float] = {}
        """Tags of which a copy is stored where it may still be forgotten, and until when."""
        self._settled = self._flushed = 0
        self._name = new_id()
        self._owner = names.owner(lane.topic, group, lane.partition)
        self._link = link
        self._prefetch = settings.prefetch
        self._has_warned = False
        self._by_content = settings.identity == CONTENT
        self._identity_key = settings.identity_key.encode()
        self._notify = notify
        self._channel: Any = None
        self._barriers: list[Reply] = []
        link.post(self._open, self._lost)

    @property
    def held(self) -> int:
        """How many messages the broker counts as being here."""
        return len(self.arrived) + len(self.unsettled)

    def take(self, limit: int) -> list[Delivery]:
        """Return at most *limit* deliveries that have arrived, in order."""
        arrived, unsettled = self.arrived, self.unsettled
        batch = []
        for _ in range(min(limit, len(arrived))):
            method, properties, body = arrived.popleft()
            tag = method.delivery_tag
            unsettled[tag] = None
            own, key, pairs, stamp, count, is_null = (
                properties.content() if type(properties) is Incoming else content_of(properties)
            )
            batch.append(
                Delivery(
                    lane=self.lane,
                    position=self._identity(tag, properties, body) if own is None else own,
                    key=key,
                    body=None if is_null and not body else body,
                    headers=pairs,
                    timestamp=stamp,
                    count=count,
                    epoch=self.epoch,
                    receipt=(tag, properties),
                )
            )
        return batch

    def _identity(self, tag: int, properties: Any, body: bytes) -> str:
        """Return what stands for the id that a message does not have."""
        if not self._has_warned:
            self._has_warned = True
            by = "content, two alike in everything are one" if self._by_content else "delivery only"
            if self._by_content and not self._identity_key:
                by += "; set identity_key= where dead letters hide some of it"
            _log.warning("messages without message_id in %s: they are recognised by their %s",
                         self.queue, by)  # fmt: skip
        if not self._by_content:
            return f"{self._name}.{tag}"
        return content_identity(full(properties), body, self._identity_key)

    def accept(self, tags: list[int]) -> None:
        """Acknowledge *tags*, with as few frames as keep the others unsettled."""
        unsettled = self.unsettled
        if deferred := self.deferred:
            tags = [tag for tag in tags if tag not in deferred]
        tags = [tag for tag in tags if unsettled.pop(tag, 0) is None]
        if not tags:
            return
        self._settled += 1
        lowest = next(iter(unsettled), None)
        if lowest is None or lowest > max(tags):
            self._settle("basic_ack", max(tags), multiple=True)
            return
        covered = [tag for tag in tags if tag < lowest]
        if covered:
            self._settle("basic_ack", max(covered), multiple=True)
        for tag in tags:
            if tag > lowest:
                self._settle("basic_ack", tag)

    def accept_deferred(self, now: float) -> None:
        """Acknowledge what was deferred until *now*."""
        due = [tag for tag, until in self.deferred.items() if until <= now]
        for tag in due:
            del self.deferred[tag]
        self.accept(due)

    def is_ours(self, tag: int) -> bool:
        """Whether *tag* was handed out and has not been settled."""
        return tag in self.unsettled and tag not in self.deferred

    def refuse(self, tag: int, *, requeue: bool) -> None:
        """Give *tag* back to the queue, or drop it for good."""
        if self.unsettled.pop(tag, 0) is None:
            self._settled += 1
            # Not basic.nack, which from 4.3 on does not count as a delivery.
            self._settle("basic_reject", tag, requeue=requeue)

    @property
    def is_unflushed(self) -> bool:
        """Whether something was settled that may not be safe yet."""
        return self._flushed < self._settled

    def barrier(self) -> Reply:
        """Return an answer that comes when all settling so far is in the queue's log.

        AMQP does not confirm acknowledgements. A consumer that only joins the waiting ones
        is confirmed once it is in the queue's replicated log, behind what the channel has told
        the queue before. That need not be everything: while many of its words are unanswered the
        channel stashes what is settled, and lets a consumer pass. So a second one follows, once
        the first has come and gone: by then all is answered, and the stash is told.
        """
        answer = Reply()
        self._link.post(partial(self._pass, answer, self._settled), partial(self._fail, answer))
        return answer

    def close(self) -> None:
        """Give up the lane: what is unsettled goes back to its place in the queue."""
        self._link.post(self._leave)

    def _settle(self, method: str, tag: int, **how: Any) -> None:
        self._link.post(partial(self._send, method, tag, how))

    # -- what follows runs in the link's thread -------------------------------------------

    def _open(self) -> None:
        self._channel = self._link.connection.channel(on_open_callback=self._opened)
        self._channel.add_on_close_callback(self._closed)

    def _opened(self, channel: Any) -> None:
        self._link.farewells.add(self._leave)
        channel.add_on_cancel_callback(self._cancelled)
        channel.basic_qos(prefetch_count=self._prefetch)
        declare = partial(channel.queue_declare, self._owner, durable=True, arguments=names.TALLY)
        declare(callback=_ignore)
        channel.basic_consume(self._owner, _ignore, auto_ack=True, callback=_ignore)
        declare(callback=self._counted)

    def _counted(self, frame: Any) -> None:
        if frame.method.consumer_count > 1:
            self.stage = ConsumerPhase.TAKEN
            self._leave()
            self._notify()
        else:
            self._channel.basic_consume(self.queue, self._received, callback=self._granted)

    def _granted(self, _: Any) -> None:
        self.stage = ConsumerPhase.OWNED
        self._notify()

    def _received(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self.arrived.append((method, properties, body))
        self._link.soon(self._notify)

    def _send(self, method: str, tag: int, how: dict[str, Any]) -> None:
        if self._channel.is_open:  # else the queue has its messages back
            getattr(self._channel, method)(tag, **how)

    def _pass(self, answer: Reply, settled: int) -> None:
        if not self._channel.is_open:
            self._fail(answer)
            return

        def again(_: Any) -> None:
            if self._channel.is_open:  # else its end fails the barrier
                self._channel.basic_consume(self.queue, self._received, callback=behind_the_stash)

        def joined(frame: Any) -> None:
            self._channel.basic_cancel(frame.method.consumer_tag, callback=again)

        def behind_the_stash(frame: Any) -> None:
            self._flushed = settled
            self._barriers.remove(answer)
            answer.give()
            self._channel.basic_cancel(frame.method.consumer_tag, callback=_ignore)

        self._barriers.append(answer)
        self._channel.basic_consume(self.queue, self._received, callback=joined)

    def _fail(self, answer: Reply) -> None:
        answer.fail(BrokerDown(f"the channel of {self.lane} was lost before its accepts were safe"))

    def _leave(self) -> None:
        if self._channel is not None and self._channel.is_open:
            close_without_cancelling(self._channel)

    def _cancelled(self, _: Any) -> None:
        self._leave()  # the queue was deleted, or its node has left

    def _closed(self, _: Any, reason: BaseException) -> None:
        self._link.farewells.discard(self._leave)
        for answer in self._barriers:
            self._fail(answer)
        if self.stage is not ConsumerPhase.TAKEN:
            self.stage, self.failure = ConsumerPhase.GONE, closed(reason)
            self._notify()

    def _lost(self) -> None:
        self.stage, self.failure = ConsumerPhase.GONE, self._link.failure
        self._notify()


def _ignore(*_: Any) -> None:
    """Nothing follows from this answer."""
