"""The kit fits brokers of competing consumers, too: no lanes of one owner, no order, no log."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cloudevents import to_wire
from holdfast.errors import MessageTooLarge, StaleDelivery, UnknownTopic, Unsupported
from holdfast.ports import Caps, Counts, Delivery, Lane, Ordering, Pause, Published, Settle
from holdfast.testing import VirtualClock
from holdfast.testing.conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.clock import Clock
    from holdfast.message import Message
    from holdfast.ports import Broker, Listener, Source

LEASE = 2.0


@dataclass(slots=True)
class Entry:
    """A message in the queue of one group."""

    position: int
    message: Message
    stored: float
    visible: float
    count: int = 0
    receipt: int = 0


@dataclass(slots=True)
class Queue:
    """What one group has not settled of one topic."""

    entries: list[Entry] = field(default_factory=list)
    dead: list[bytes | None] = field(default_factory=list)


class QueueBroker:
    """As SQS has it: a copy for each group that is known, hidden while somebody works on it."""

    name = "queue"
    caps = Caps(
        settle=Settle.INDIVIDUAL,
        ordering=Ordering.NONE,
        counts=Counts.DELIVERY,
        delay=60.0,
        lease=LEASE,
        native_dlq=True,
        pause=Pause.ALL,
        publish_dedup=300.0,
        max_message=65_536,
        max_headers=8_192,
    )

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.topics: dict[str, dict[str, Queue]] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self._known: set[tuple[str, str]] = set()

    def sink(self) -> QueueBroker:
        """Return the broker itself, which publishes."""
        return self

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Copy each message to every group of its topic."""
        with self.lock:
            return [self._store(message) for message in messages]

    def _store(self, message: Message) -> Published:
        headers = message.headers.size
        if headers > (self.caps.max_headers or 0):
            return Published(MessageTooLarge(headers, 8_192, "headers"))
        if message.size > (self.caps.max_message or 0):
            return Published(MessageTooLarge(message.size, 65_536))
        if message.topic not in self.topics:
            return Published(UnknownTopic(message.topic, "create it"))
        if (message.topic, message.identity) not in self._known:
            self._known.add((message.topic, message.identity))
            position, now = next(self.numbers), self.clock.now().timestamp()
            for queue in self.topics[message.topic].values():
                entry = Entry(position, message, now, self.clock.monotonic())
                queue.entries.append(entry)
        return Published()

    def source(
        self, topics: Sequence[str], *, group: str, listener: Listener | None = None
    ) -> Source:
        """Return a consumer that competes with the others of its group."""
        with self.lock:
            for topic in topics:
                if topic not in self.topics:
                    raise UnknownTopic(topic, "create it")
                self.topics[topic].setdefault(group, Queue())
        return QueueSource(self, topics, group, listener)

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make *topic*; it has one lane, whatever *partitions* says."""
        self.topics.setdefault(topic, {})

    def create_group(self, topic: str, group: str) -> None:
        """Make the queue of *group*."""
        if topic not in self.topics:
            raise UnknownTopic(topic, "create it")
        self.topics[topic].setdefault(group, Queue())

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether there is a queue of *group*."""
        return group in self.topics.get(topic, {})

    def prune(self, topics: Sequence[str] | None = None, **_: Any) -> Mapping[str, int]:
        """Refuse: what is settled is gone."""
        raise Unsupported("prune", "this queue")

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return what is in the queues."""
        return {Lane(topic, 0): len(self.topics[topic][group].entries) for topic in topics}

    def abandon(self, source: Any) -> None:
        """Do nothing: what a dead consumer held shows again when its lease has ended."""

    def close(self) -> None:
        """Do nothing."""


class QueueSource:
    """One of the competing consumers."""

    def __init__(
        self, broker: QueueBroker, topics: Sequence[str], group: str, listener: Listener | None
    ) -> None:
        self.caps = broker.caps
        self._broker = broker
        self._clock = broker.clock
        self._queues = {Lane(topic, 0): broker.topics[topic][group] for topic in topics}
        self._listener = listener
        self._state = "new"
        self._is_paused = False
        self._woken = threading.Event()
        self._held: dict[int, tuple[Queue, Entry]] = {}

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return what nobody works on."""
        if self._state == "new":
            self._state = "open"
            if self._listener is not None:
                self._listener.assigned(self._queues)
        until = self._clock.monotonic() + timeout
        while True:
            got = [] if self._is_paused else self._receive(limit)
            left = until - self._clock.monotonic()
            if got or left <= 0 or self._clock.wait(self._woken, min(left, 0.01)):
                self._woken.clear()
                return got

    def _receive(self, limit: int) -> list[Delivery]:
        now = self._clock.monotonic()
        got: list[Delivery] = []
        with self._broker.lock:
            for lane, queue in self._queues.items():
                for entry in queue.entries:
                    if entry.visible <= now and len(got) < limit:
                        got.append(self._hand_out(lane, queue, entry, now + LEASE))
        return got

    def _hand_out(self, lane: Lane, queue: Queue, entry: Entry, until: float) -> Delivery:
        entry.receipt, entry.visible = next(self._broker.numbers), until
        entry.count += 1
        self._held[entry.receipt] = queue, entry
        return Delivery(
            lane=lane,
            position=entry.position,
            key=entry.message.key,
            body=entry.message.payload,
            headers=to_wire(entry.message),
            timestamp=entry.stored,
            count=entry.count,
            lease_until=until,
            receipt=entry.receipt,
        )

    def _let_go(self, delivery: Delivery) -> tuple[Queue, Entry] | None:
        queue, entry = self._held.pop(delivery.receipt, (None, None))
        if queue is None or entry is None or entry.receipt != delivery.receipt:
            return None
        return queue, entry

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Take *deliveries* out of the queue."""
        with self._broker.lock:
            for delivery in deliveries:
                if (found := self._let_go(delivery)) is not None:
                    found[0].entries.remove(found[1])

    def reject(self, delivery: Delivery) -> None:
        """Move *delivery* to the dead letters."""
        with self._broker.lock:
            if (found := self._let_go(delivery)) is not None:
                found[0].entries.remove(found[1])
                found[0].dead.append(delivery.body)

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Show *delivery* again after *delay*."""
        if delay is not None and delay > (self.caps.delay or 0):
            raise Unsupported(f"delay by {delay} s", "queue")
        with self._broker.lock:
            if (found := self._let_go(delivery)) is not None:
                found[1].receipt = 0
                found[1].visible = self._clock.monotonic() + (delay or 0.0)

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Hide *delivery* for longer."""
        with self._broker.lock:
            _, entry = self._held.get(delivery.receipt, (None, None))
            if entry is None or entry.receipt != delivery.receipt:
                raise StaleDelivery(f"{delivery.position} is not held here")
            entry.visible = self._clock.monotonic() + seconds

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Pause all lanes."""
        if set(lanes) != set(self._queues):
            raise Unsupported("pause some lanes", "queue")
        self._is_paused = True

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Resume all lanes."""
        self._is_paused = False

    def seek(self, lane: Lane, *, offset: int | None = None, time: datetime | None = None) -> None:
        """Refuse."""
        raise Unsupported("seek", "queue")

    def assignment(self) -> frozenset[Lane]:
        """Return the topics' only lanes."""
        return frozenset(self._queues) if self._state == "open" else frozenset()

    def lag(self) -> Mapping[Lane, int]:
        """Return what is in the queues."""
        return {lane: len(queue.entries) for lane, queue in self._queues.items()}

    def flush(self) -> None:
        """Do nothing: every call is durable."""

    def wake(self) -> None:
        """Wake a waiting poll."""
        self._woken.set()

    def close(self) -> None:
        """Show everything held at once."""
        if self._state == "open" and self._listener is not None:
            self._listener.revoked(self._queues)
        self._state = "closed"
        with self._broker.lock:
            for receipt, (_, entry) in self._held.items():
                if entry.receipt == receipt:
                    entry.receipt, entry.visible = 0, self._clock.monotonic()
            self._held.clear()


class TestQueue(BrokerConformance):
    """Every promise of the port, on a broker unlike the embedded one."""

    def abandon(self, broker: Any, source: Source) -> None:
        """Let the broker itself do it."""
        broker.abandon(source)

    @pytest.fixture
    def broker(self) -> QueueBroker:
        """Return the queue on a virtual clock."""
        self.clock = VirtualClock(auto=True)
        return QueueBroker(self.clock)

    def dead_letters(self, broker: Broker, topic: str, group: str) -> list[bytes | None]:
        """Look into the dead letters of the group."""
        assert isinstance(broker, QueueBroker)
        return broker.topics[topic][group].dead
