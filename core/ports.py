"""The broker port: two small protocols, and the delivery that passes between them.

What a broker can do is declared by its adapter, and proven by the conformance kit. All that an
adapter is written with is here; its errors are those of `holdfast`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from holdfast.cloudevents import from_wire
from holdfast.errors import MessageTooLarge, Unsupported
from holdfast.ids import derived_id
from holdfast.message import Message
from holdfast.progress import GroupProgress, LaneProgress
from holdfast.stored_message import StoredMessage
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from holdfast.errors import HoldfastError
    from holdfast.headers import Pair


__all__ = [
    "Broker",
    "BrokerPowers",
    "BrokerUrl",
    "Caps",
    "Counts",
    "Delivery",
    "GroupProgress",
    "Lane",
    "LaneProgress",
    "Listener",
    "Message",
    "Ordering",
    "Pause",
    "Position",
    "Published",
    "Settle",
    "Sink",
    "SinkPowers",
    "Source",
    "TopicSettings",
]

Position = int | str
_UNKNOWN = datetime.fromtimestamp(0, UTC)


class Lane(NamedTuple):
    """One ordered stretch of a topic: a partition, or what an adapter uses for one."""

    topic: str
    partition: int


class Delivery(msgspec.Struct, kw_only=True, eq=False):
    """One handing-out of a message to one group; the same message may be handed out again.

    `message` is decoded when first asked for, so that routing and settling stay cheap.
    """

    lane: Lane
    position: Position
    key: bytes | None
    body: bytes | None
    headers: Sequence[Pair] = ()
    timestamp: float | None = None
    """When the broker stored it, in POSIX seconds."""
    count: int | None = None
    """The broker's own count, from 1; None where it does not count."""
    epoch: int = 0
    """The assignment under which it was handed out; settling under an ended one is ignored."""
    lease_until: float | None = None
    """When it will be handed out again unless settled or extended, by the monotonic clock."""
    receipt: Any = None
    """The adapter's own handle; nobody else looks inside."""
    decoded: Message | None = None
    known_id: str | None = None
    """The id that it got when it first came, where its own coordinates are not kept in full."""

    @property
    def message(self) -> Message:
        """The message; one without an id gets the id that follows from its coordinates."""
        if self.decoded is None:
            self.decoded = from_wire(
                topic=self.lane.topic,
                key=self.key,
                body=self.body,
                headers=self.headers,
                fallback_id=self.coordinates_id,
                fallback_time=self.stored_at,
            )
        return self.decoded

    def stored_at(self) -> datetime:
        """Return when the broker stored it; a stamp that is none, or no date, counts as 1970.

        Brokers keep what a producer wrote: also microseconds where they mean milliseconds.
        """
        try:
            return datetime.fromtimestamp(self.timestamp or 0.0, UTC)
        except (ValueError, OverflowError, OSError):
            return _UNKNOWN

    def coordinates_id(self) -> str:
        """Return the id derived from topic, partition and position: the same each time."""
        if self.known_id is not None:
            return self.known_id
        return derived_id(self.lane.topic, str(self.lane.partition), str(self.position))


class Published(msgspec.Struct, frozen=True, gc=False):
    """What became of one message of a batch: stored if `error` is None."""

    error: HoldfastError | None = None
    lane: Lane | None = None
    position: Position | None = None


class Listener(Protocol):
    """Hears of assignment changes, always inside `Source.poll` or `Source.close`."""

    def assigned(self, lanes: Iterable[Lane]) -> None:
        """*lanes* now belong to this member."""
        ...

    def revoked(self, lanes: Iterable[Lane]) -> None:
        """*lanes* are about to leave: stop their work and settle it before returning."""
        ...

    def lost(self, lanes: Iterable[Lane]) -> None:
        """*lanes* have gone already: drop their work, settle nothing."""
        ...


class Source(Protocol):
    """A member of a consumer group. One thread uses it; only `wake` may be called by others.

    Foreign errors arrive translated: `BrokerDown` from any method means that nothing was
    settled by that call and that the same call may be made again.
    """

    caps: Caps

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, waiting up to *timeout* seconds for the first.

        Must be called regularly even when everything is paused: it also keeps the
        membership alive and tells the listener of assignment changes.
        """
        ...

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* as done, in any order; later ones never cover unfinished ones.

        Durable at the latest when `flush` or `close` returns.
        """
        ...

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Give *delivery* back to be handed out again, not before *delay* seconds."""
        ...

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused for good: it is not handed out to this group again."""
        ...

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Keep *delivery* for *seconds* from now; `StaleDelivery` when it is ours no more."""
        ...

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Hand out nothing from *lanes* until resumed; a rebalance does not resume them."""
        ...

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Undo `pause`."""
        ...

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group to *offset*, or to the first message stored at or after *time*."""
        ...

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes that belong to this member now."""
        ...

    def lag(self) -> Mapping[Lane, int]:
        """Return how many messages of each assigned lane are not yet settled."""
        ...

    def flush(self) -> None:
        """Return once everything settled so far is durable on the broker."""
        ...

    def wake(self) -> None:
        """Make a `poll` that waits, or else the next one, return early. Any thread may call it."""
        ...

    def close(self) -> None:
        """Leave the group: unsettled deliveries go to other members without blame."""
        ...


class Sink(Protocol):
    """Publishes messages. Threads do not share one."""

    caps: Caps

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Return one result per message, once the broker has durably taken or refused each.

        Messages of one key are stored in the order given. `BrokerDown` means that any
        part of the batch may have been stored and none is known to be: publish it again.
        """
        ...

    def close(self) -> None:
        """Release the connection; everything that `publish` returned for is stored."""
        ...


class Broker(Protocol):
    """One broker reached through one adapter."""

    name: str
    caps: Caps

    def sink(self, **native: Any) -> Sink:
        """Return a new sink; *native* settings go to the client library untouched."""
        ...

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a new member of *group*; *native* settings go to the client untouched."""
        ...

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one is left as it is."""
        ...

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that what is published to *topic* from now on is kept for *group*.

        Nobody need be a member yet. Done again it changes nothing; a topic that does not
        exist is made where that is allowed, else it is `UnknownTopic`.
        """
        ...

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *group* gets what is published to *topic* from now on.

        With `Caps.late_groups` it does as soon as the topic exists; without, once
        `create_group` or the group's first source has returned. The broker is asked each
        time, and nothing is made.
        """
        ...

    def prune(
        self,
        topics: Sequence[str] | None = None,
        *,
        older_than: float,
        most: int = 10_000,
        dry_run: bool = False,
    ) -> Mapping[str, int]:
        """Delete what every group settled and is *older_than* seconds old; return counts by topic.

        At most about *most* at a time, of *topics* or of all. What any known group has not
        settled is never deleted, nor anything of a topic that no group has read. *dry_run*
        only counts. `Unsupported` without `Caps.prune`.
        """
        ...

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return how many messages *group* has not yet settled, by lane."""
        ...

    def close(self) -> None:
        """Release what the broker object itself holds; its sinks and sources stay open."""
        ...


class Settle(Enum):
    """How messages are acknowledged."""

    CUMULATIVE = "cumulative"
    INDIVIDUAL = "individual"


class Counts(Enum):
    """What the broker's own delivery counter counts."""

    NONE = "none"
    DELIVERY = "delivery"
    FAILURE = "failure"


class Ordering(Enum):
    """Within what the broker hands messages out in order."""

    PARTITION = "partition"
    KEY = "key"
    NONE = "none"


class Pause(Enum):
    """What can be paused without leaving the group."""

    LANE = "lane"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The capabilities of one broker through one adapter.

    What is not declared here raises `Unsupported`; it is never pretended.
    """

    settle: Settle
    """Cumulative brokers get the contiguous watermark, so `accept` is safe in any order."""
    ordering: Ordering
    counts: Counts = Counts.NONE
    """Deliveries carry `count`, from 1. FAILURE counts blamed releases and crashes only."""
    blameless_release: bool = False
    """`release(blame=False)` leaves the native count as it was."""
    release_keeps_order: bool = False
    """After a release, later messages of that key not yet handed out wait behind it."""
    delay: float | None = None
    """Longest native delay of a release, in seconds; None: `release(delay=…)` is refused."""
    lease: float | None = None
    """Seconds until an unsettled delivery comes again; None: it stays with its owner."""
    native_dlq: bool = False
    """`reject` moves the message to a dead-letter place of the broker's own."""
    pause: Pause = Pause.NONE
    transactions: bool = False
    """A batch can be published atomically: all that can be stored of it, or nothing.

    Kafka does so for sinks made with `transactional_id=`, where one refused message takes
    the others back, too; the embedded brokers and Redis do so for every batch.
    """
    fencing: bool = False
    """Whether a sink opened under the same transactional id shuts its elder out."""
    publish_dedup: float | None = None
    """Seconds within which a message id published twice is stored once."""
    max_message: int | None = None
    """Bytes of payload, key and headers that the adapter takes; None: no limit known."""
    max_headers: int | None = None
    """Bytes of headers that the adapter takes; None: bounded by `max_message` alone."""
    replay: bool = False
    """`seek` moves a group to an offset or a time."""
    prune: bool = False
    """`prune` deletes what every group has settled; the others end messages by settings of
    their own, or with their settling."""
    late_groups: bool = False
    """A new group also gets what was published before it came, as far as that is still kept.

    Else it gets what is published once `create_group`, or its first source, has returned: make
    groups before the first message is published.
    """


class SinkPowers(ABC):
    """What a sink may do beyond `Sink`: it says so by inheriting this, and overrides what it can.

    Whoever can use a power asks `SinkPowers.of(sink)`, which any sink has; nothing is guessed
    from the names of methods.
    """

    caps: Caps
    keeps_deadlines: ClassVar[bool] = False
    """Whether `publish_within` gives up in time, with nothing on its way afterwards."""

    @classmethod
    def of(cls, sink: Sink) -> SinkPowers:
        """Return the powers of *sink*; of one that declares none, the usual."""
        return sink if isinstance(sink, SinkPowers) else _PlainSink(sink)

    @abstractmethod
    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Do as `Sink.publish` says."""

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        """Do as `publish`, within *seconds* where deadlines are kept: after them `BrokerDown`.

        Results need not tell where a message is stored, which spares some sinks work.
        """
        del seconds
        return self.publish(messages)

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do now what the first `publish_within` would take time for."""

    def room(self, topics: Collection[str]) -> int | None:
        """Return how many bytes a message may have in each of *topics*; None: no limit known.

        0 where one of them does not exist, as far as that is known.
        """
        del topics
        return self.caps.max_message

    def refusal(self, message: Message) -> HoldfastError | None:
        """Return why the broker would refuse *message*, as far as can be told; None if it won't."""
        limit = self.caps.max_message
        packed = message.packed if isinstance(message, StoredMessage) else ""
        size = len(message.payload or b"") + len(message.key or b"") + len(packed.encode())
        return None if limit is None or size <= limit else MessageTooLarge(size, limit)


class _PlainSink(SinkPowers):
    """A sink without powers of its own."""

    def __init__(self, sink: Sink) -> None:
        self.caps = sink.caps
        self._sink = sink

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        return self._sink.publish(messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """How safely a topic keeps what it was given; None where the broker does not tell."""

    replicas: int | None = None
    """Copies of each message, of the partition that has fewest."""
    in_sync: int | None = None
    """Copies that are up to date now, of the partition that has fewest."""
    least_in_sync: int | None = None
    """Copies that must be up to date, or else what is published is refused."""


class BrokerPowers(ABC):
    """What a broker may do beyond `Broker`: it says so by inheriting this, as `SinkPowers`."""

    tells_progress: ClassVar[bool] = False
    """Whether `progress` answers; `holdfast lag` then shows more than a count."""

    @classmethod
    def of(cls, broker: Broker) -> BrokerPowers:
        """Return the powers of *broker*; of one that declares none, the usual."""
        return broker if isinstance(broker, BrokerPowers) else _PlainBroker(broker)

    @abstractmethod
    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Do as `Broker.create_topic` says."""

    @abstractmethod
    def sink(self, **native: Any) -> Sink:
        """Do as `Broker.sink` says."""

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return 1

    def topics(self) -> Mapping[str, int] | None:
        """Return all topics but the broker's own, each with the number of its lanes.

        None where the broker cannot tell.
        """
        return None

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far *group* is in *topics*, or in all that it reads or has read.

        `UnknownTopic` for a topic that does not exist, `UnknownGroup` for a group that nobody
        is a member of and that has settled nothing, `Unsupported` where topics must be named,
        or without `tells_progress`. Asking changes nothing.
        """
        del group, topics
        raise Unsupported("tell how far a group is", type(self).__name__)

    def retention(self, topics: Collection[str]) -> Mapping[str, float]:
        """Return the seconds for which each of *topics* keeps messages, settled or not.

        One that is missing keeps them until they are settled, or the broker does not tell.
        """
        del topics
        return {}

    def servers(self) -> int | None:
        """Return how many servers the broker is made of; None where it does not tell."""
        return None

    def settings(self, topics: Collection[str]) -> Mapping[str, TopicSettings]:
        """Return how safely *topics* keep messages; a topic of which nothing is told is left out.

        Asking changes nothing.
        """
        del topics
        return {}

    def create_larger(self, topic: str, *, like: str, more: int) -> None:
        """Make sure that *topic* exists; a new one takes *more* bytes a message than *like*.

        That is so where topics have limits of their own; elsewhere it is a topic as any.
        """
        del like, more
        self.create_topic(topic)

    def larger_sink(self, more: int) -> Sink:
        """Return a sink whose messages may have *more* bytes, where a sink limits them itself."""
        del more
        return self.sink()

    def abandon(self, source: Source) -> bool:
        """Treat *source* as if its process had died now, for tests; False where that cannot be."""
        del source
        return False


class _PlainBroker(BrokerPowers):
    """A broker without powers of its own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        self._broker.create_topic(topic, partitions=partitions)

    def sink(self, **native: Any) -> Sink:
        return self._broker.sink(**native)
