"""What the adapter asks of a Kafka client library: the whole difference between two drivers.

Everything here speaks Holdfast's types and raises Holdfast's errors. A driver decides
nothing about settling, order or retries; it carries out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.brokers.kafka.lane import LaneState
    from holdfast.errors import HoldfastError
    from holdfast.message import Message
    from holdfast.ports import Delivery, Lane, Published

Offsets = dict["Lane", int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far one lane reaches, and how far a group is in it."""

    first: int
    end: int
    committed: int | None

    @property
    def lag(self) -> int:
        """Messages (and gaps between them) that the group has not settled."""
        done = self.first if self.committed is None else max(self.committed, self.first)
        return max(self.end - done, 0)


class Rebalancing(BrokerDown):
    """The group is being rearranged, which goes on only while its members poll."""


class Nobody:
    """Hears of assignment changes in the place of somebody who is not interested any more."""

    def assigned(self, lanes: Collection[Lane]) -> None:
        """Do nothing."""

    def revoked(self, lanes: Collection[Lane]) -> None:
        """Do nothing."""

    def lost(self, lanes: Collection[Lane]) -> None:
        """Do nothing."""


class Rebalance(Protocol):
    """Hears of assignment changes, in the thread that called the member."""

    def assigned(self, lanes: Collection[Lane]) -> None:
        """*lanes* came."""
        ...

    def revoked(self, lanes: Collection[Lane]) -> None:
        """*lanes* leave when this returns; commits still pass."""
        ...

    def lost(self, lanes: Collection[Lane]) -> None:
        """*lanes* are gone; commits would be refused."""
        ...


TOPIC_LIMIT = 1_048_588
"""Bytes of the largest batch that a topic takes unless told otherwise."""


class Admin(Protocol):
    """Questions about the cluster. Threads may share it."""

    def partitions(self, topic: str) -> list[int] | None:
        """Return the partitions of *topic*; None when it does not exist."""
        ...

    def topics(self) -> Mapping[str, int]:
        """Return the topics but Kafka's own, each with the number of its partitions."""
        ...

    def create(
        self, topic: str, partitions: int, replicas: int | None, configs: Mapping[str, str]
    ) -> None:
        """Create *topic*; an existing one is left as it is."""
        ...

    def largest(self, topic: str) -> int | None:
        """Return the bytes of the largest batch that *topic* takes; None if that is not told."""
        ...

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, Extent]:
        """Return how far each lane reaches and how far *group*, if any, is.

        For a group, a lane ends before transactions that are still open: it cannot read them.
        """
        ...

    def ends(self, lanes: Collection[Lane]) -> dict[Lane, int]:
        """Return up to where each lane can be read now: before transactions still open."""
        ...

    def at_time(self, lane: Lane, milliseconds: int) -> int | None:
        """Return the first offset stored at or after a time; None when there is none."""
        ...

    def close(self) -> None:
        """Release the connections."""
        ...


class Producer(Protocol):
    """Sends batches; one thread uses it."""

    def prepare(self, *, located: bool) -> None:
        """Get ready for publishes that are *located* or not, so that the first need not."""
        ...

    def publish(
        self, messages: Sequence[Message], until: float, *, located: bool = True
    ) -> list[Published]:
        """Return one result per message once each is stored or refused.

        `Transient` (or `BrokerDown`) for those that were not sent again after another one
        was refused: there was no time, or they are of the key of the refused one. Of a lane,
        nothing behind such a message is stored.

        Unless *located*, lanes and positions need not be told where that costs something,
        and what was stored before a refusal may be sent again with the rest of the batch.
        `BrokerDown` when that is not known for all by *until* on the monotonic clock.
        """
        ...

    def begin(self) -> None:
        """Open a transaction."""
        ...

    def commit(self, until: float) -> None:
        """Make what was published since `begin` visible, all at once."""
        ...

    def abort(self, until: float) -> None:
        """Take back what was published since `begin`."""
        ...

    def abandon(self) -> None:
        """Drop what is still on its way and release the connections at once."""
        ...

    def close(self) -> None:
        """Release the connections; nothing is on its way between publishes."""
        ...


class Member(Protocol):
    """A member of a consumer group; one thread uses it."""

    def fetch(
        self, limit: int, timeout: float, lanes: Mapping[Lane, LaneState]
    ) -> list[list[Delivery]]:
        """Return at most *limit* records of *lanes*, waiting up to *timeout* for the first.

        They come in runs: each inner list is of one lane, ascending and not empty.
        `BrokerDown` from when the servers are out of reach until one has answered a fetch or a
        heartbeat again.
        """
        ...

    def commit(self, offsets: Offsets, seconds: float) -> None:
        """Return once *offsets* are durable.

        `StaleDelivery` when the membership is gone, `Rebalancing` when the client must be
        polled first, `BrokerDown` when it cannot be told.
        """
        ...

    def commit_soon(
        self, offsets: Offsets, done: Callable[[Offsets, HoldfastError | None], None]
    ) -> None:
        """Start a commit; a later `fetch` calls *done* in the same thread."""
        ...

    def pause(self, lanes: Collection[Lane]) -> None:
        """Fetch nothing from *lanes*, which are assigned."""
        ...

    def resume(self, lanes: Collection[Lane]) -> None:
        """Undo `pause`."""
        ...

    def seek(self, lane: Lane, offset: int) -> None:
        """Fetch from *offset* next; what was fetched before is dropped."""
        ...

    def reached(self, lane: Lane) -> int | None:
        """Return up to where everything was fetched, markers of transactions included."""
        ...

    def doubt(self, why: str) -> None:
        """Take the servers for out of reach, since another client found that, until one answers."""
        ...

    def is_joined(self) -> bool:
        """Whether the group counts this member in, as far as the client knows."""
        ...

    def close(self) -> None:
        """Leave the group at once."""
        ...

    def abandon(self) -> None:
        """Leave the group if that still works; do not wait for it, and tell nobody anything."""
        ...


class Driver(Protocol):
    """One client library."""

    name: str

    def limit(self, native: Mapping[str, Any]) -> int:
        """Return the bytes of the largest message that a producer with *native* settings takes."""
        ...

    def larger(self, more: int) -> dict[str, Any]:
        """Return the native setting of a producer with room for *more* than a topic takes."""
        ...

    def compresses(self, native: Mapping[str, Any]) -> bool:
        """Whether a producer with *native* settings compresses what it sends."""
        ...

    def admin(self) -> Admin:
        """Return a connected admin; `BrokerDown` or `ConfigurationError` if that fails."""
        ...

    def producer(self, native: Mapping[str, Any], transactional_id: str | None) -> Producer:
        """Return an idempotent producer that waits for all replicas."""
        ...

    def member(
        self, topics: Sequence[str], group: str, rebalance: Rebalance, native: Mapping[str, Any]
    ) -> Member:
        """Return a member of *group* that never commits by itself."""
        ...
