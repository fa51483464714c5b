"""The broker port: two small protocols, and the delivery that passes between them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from holdfast.cloudevents import from_wire
from holdfast.ids import derived_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.caps import Caps
    from holdfast.errors import HoldfastError
    from holdfast.headers import Pair
    from holdfast.message import Message

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


@runtime_checkable
class KnowsTopics(Protocol):
    """A broker that can tell its topics; not every one can."""

    def topics(self) -> Mapping[str, int]:
        """Return all topics but the broker's own, each with the number of its lanes."""
        ...
