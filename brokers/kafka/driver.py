"""What the adapter asks of a Kafka client library: the whole difference between two drivers.

Everything here speaks Holdfast's types and raises Holdfast's errors. A driver decides
nothing about settling, order or retries; it carries out.

Null header values where the client refuses to write them.

Kafka has null header values, and so does librdkafka. kafka-python reads them but writes
none, so through it a null is written empty, and a last header `holdfast-nulls` lists the
places of the nulls among all headers, from 0 and comma-separated: `7,9`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import BrokerDown, ConfigurationError
from holdfast.ports import TopicSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from holdfast.brokers.kafka.offsets import KafkaLane
    from holdfast.errors import HoldfastError
    from holdfast.headers import Pair
    from holdfast.message import Message
    from holdfast.ports import Delivery, Lane, Published


Offsets = dict["Lane", int]


def refuse(native: Mapping[str, Any], name: str, allowed: object, why: str) -> None:
    """Refuse a client setting that would break a promise."""
    if name in native and str(native[name]).lower() != str(allowed).lower():
        raise ConfigurationError(f"{name}={native[name]!r}: leave it at {allowed}, {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """How far one lane reaches, and how far a group is in it."""

    first: int
    end: int
    committed: int | None

    @property
    def next(self) -> int:
        """Where the group goes on: behind what it settled and what the server deleted."""
        return self.first if self.committed is None else max(self.committed, self.first)

    @property
    def lag(self) -> int:
        """Messages (and gaps between them) that the group has not settled."""
        return max(self.end - self.next, 0)

    @property
    def deleted(self) -> int:
        """Messages (and gaps) that the server deleted before the group had settled them."""
        return 0 if self.committed is None else max(self.first - self.committed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """Who is in a group now."""

    count: int | None
    """None where the client cannot tell, of a group of the newer protocol say."""
    readers: Mapping[str, int]
    """How many members have partitions of each topic."""
    is_settled: bool = True
    """Whether partitions are dealt out; while they are not, readers are not to be told."""

    def of(self, topic: str) -> int | None:
        """Return how many members read *topic*."""
        return self.readers.get(topic, 0) if self.count and self.is_settled else self.count


def kept_seconds(retention: str | None, policy: str | None) -> float | None:
    """Return how long a topic keeps messages by its settings; None: for ever, or not told."""
    if retention is None or "delete" not in (policy or ""):
        return None
    return None if int(retention) < 0 else int(retention) / 1000


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


LEAST_IN_SYNC = "min.insync.replicas"


def topic_settings(copies: Collection[tuple[int, int]], least: str | None) -> TopicSettings:
    """Return settings from replicas and in-sync replicas of each partition, and Kafka's least."""
    return TopicSettings(
        replicas=min((replicas for replicas, _ in copies), default=None),
        in_sync=min((in_sync for _, in_sync in copies), default=None),
        least_in_sync=None if least is None else int(least),
    )


class Admin(Protocol):
    """Questions about the cluster. Threads may share it."""

    def partitions(self, topic: str) -> list[int] | None:
        """Return the partitions of *topic*; None when it does not exist."""
        ...

    def topics(self) -> Mapping[str, int]:
        """Return the topics but Kafka's own, each with the number of its partitions."""
        ...

    def servers(self) -> int:
        """Return how many brokers the cluster has now."""
        ...

    def settings(self, topics: Collection[str]) -> dict[str, TopicSettings]:
        """Return the replication of *topics*; what is not told is left out."""
        ...

    def create(
        self, topic: str, partitions: int, replicas: int | None, configs: Mapping[str, str]
    ) -> None:
        """Create *topic*; an existing one is left as it is."""
        ...

    def largest(self, topic: str) -> int | None:
        """Return the bytes of the largest batch that *topic* takes; None if that is not told."""
        ...

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, OffsetRange]:
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

    def committed_topics(self, group: str) -> set[str]:
        """Return the topics in which *group* has committed something."""
        ...

    def members(self, group: str) -> GroupMembers:
        """Return who is in *group*; nobody is in one that does not exist."""
        ...

    def retention(self, topics: Collection[str]) -> dict[str, float]:
        """Return the seconds that topics keep messages; one that is missing is not told."""
        ...

    def stored_at(self, offsets: Offsets) -> dict[Lane, float]:
        """Return when the first message at or after each of *offsets* was stored, if any was.

        In POSIX seconds. A lane without an answer within some seconds is left out.
        """
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


class GroupClient(Protocol):
    """A member of a consumer group; one thread uses it."""

    def fetch(
        self, limit: int, timeout: float, lanes: Mapping[Lane, KafkaLane]
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
    ) -> GroupClient:
        """Return a member of *group* that never commits by itself."""
        ...


NULLS = "holdfast-nulls"


def hidden(pairs: Iterable[Pair]) -> list[tuple[str, bytes]]:
    """Return *pairs* without a null, and where the nulls were."""
    written: list[tuple[str, bytes]] = []
    places = []
    for place, (name, value) in enumerate(pairs):
        if value is None:
            places.append(b"%d" % place)
        written.append((name, b"" if value is None else value))
    if places:
        written.append((NULLS, b",".join(places)))
    return written


def restored(headers: Sequence[Pair]) -> Sequence[Pair]:
    """Return *headers*, whose last one is `NULLS`, as they were; nonsense is left alone."""
    *pairs, (_, places) = headers
    try:
        nulls = {int(place) for place in (places or b"").split(b",")}
    except ValueError:
        return headers
    if any(place >= len(pairs) or pairs[place][1] for place in nulls):
        return headers
    return [
        (name, None) if place in nulls else (name, value)
        for place, (name, value) in enumerate(pairs)
    ]
