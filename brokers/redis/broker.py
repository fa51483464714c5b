"""`redis://host:port/database`, `rediss://` over TLS: topics on Redis Streams.

Each lane of a topic is a stream of its own. A lane belongs to one member of a group at a time,
and only that member reads it, so that the order per key holds; whatever a member does to a
lane that it has lost is ignored by the server. How entries look is told in `wire`, the keys in
`keys`.

A message is as durable as Redis keeps it: with `appendfsync always` a crash loses nothing that
was published or settled; with `everysec`, the server's default once the append-only file is
on, it may lose the last second; without that file, everything. Replication is asynchronous:
to survive the loss of a primary set `min-replicas-to-write`, and know that a failover may still
lose what no replica had. Needs Redis 6.2 or later, or Valkey; not Redis Cluster.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups import named
from holdfast.brokers.redis import server
from holdfast.brokers.redis.doorbell import Doorbell
from holdfast.brokers.redis.keys import Keys
from holdfast.brokers.redis.ledger import Ledger
from holdfast.brokers.redis.link import Link, connections, evaluation
from holdfast.brokers.redis.membership import Membership
from holdfast.brokers.redis.scripts import INTRODUCE, PRUNE
from holdfast.brokers.redis.settings import RedisSettings
from holdfast.brokers.redis.sink import RedisSink
from holdfast.brokers.redis.source import RedisSource
from holdfast.brokers.redis.topics import Topics
from holdfast.caps import Caps, Counts, Ordering, Pause, Settle
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.ids import new_id
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.ports import Listener, Sink, Source
    from holdfast.urls import BrokerUrl


class RedisBroker:
    """Topics with lanes by key, groups that share them, kept in Redis Streams."""

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        self.name = str(url)
        self._settings, self._url, self._native = RedisSettings.split(url, native)
        self._clock = clock
        self.keys = Keys(self._settings.prefix)
        self._link = self._connect({})
        self._topics = Topics(self._link, self.keys, self._settings)
        self.caps = Caps(
            settle=Settle.INDIVIDUAL,
            ordering=Ordering.PARTITION,
            counts=Counts.FAILURE,
            blameless_release=True,
            release_keeps_order=True,
            delay=float("inf"),
            pause=Pause.LANE,
            transactions=True,
            max_message=self._settings.max_message,
            replay=True,
            prune=True,
            late_groups=True,
        )

    def sink(self, **native: Any) -> Sink:
        """Return a new sink with a connection of its own."""
        link = self._connect_checked(native)
        return RedisSink(link, self.keys, Topics(link, self.keys, self._settings), self.caps)

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a new member of *group*, which starts at the beginning of *topics*."""
        if isinstance(topics, str) or not topics or not group:
            raise ConfigurationError(
                f"source(topics={topics!r}, group={group!r}): name a list of topics and a group"
            )
        link = self._connect_checked(native)
        register = Topics(link, self.keys, self._settings)
        try:
            for topic in topics:
                register.lanes(topic)
        except HoldfastError:
            link.disconnect()
            raise
        keys, clock = self.keys, self._clock
        return RedisSource(
            link,
            Membership(link, keys, register, group, topics, self._settings.session, new_id()),
            Ledger(link, keys, group, clock),
            Doorbell(self._connect(native, loads=()), link, clock),
            self.caps,
            clock,
            listener,
        )

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return self._settings.partitions

    def topics(self) -> Mapping[str, int]:
        """Return all topics with the number of their lanes."""
        return self._topics.known(self._topics.all())

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its lanes."""
        self._topics.create(topic, partitions)

    def create_group(self, topic: str, group: str) -> None:
        """Note that *group* reads *topic* from its beginning: `prune` keeps it for the group."""
        named(topic, group)
        lanes = [Lane(topic, number) for number in range(self._topics.lanes(topic))]
        self._link.calls(
            [evaluation(INTRODUCE, (self.keys.stream(lane),), group) for lane in lanes]
        )

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *topic* exists: every group starts at its beginning."""
        named(topic, group)
        return bool(self._topics.known([topic]))

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        ledger = Ledger(self._link, self.keys, group, self._clock)
        return ledger.lags(self._lanes(topics))

    def prune(
        self,
        topics: Sequence[str] | None = None,
        *,
        older_than: float,
        most: int = 10_000,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Delete messages of *topics*, or all, that every group settled, *older_than* seconds old.

        About *most* per lane at a time. A message that any group has not settled is never
        deleted, nor one in a lane that no group has read yet; a lane's newest settled
        message stays.
        """
        seconds, micros = self._link.call("TIME")
        cut = int(seconds) * 1000 + int(micros) // 1000 - round(older_than * 1000)
        lanes = self._lanes(self._topics.all() if topics is None else topics)
        counts = self._link.calls(
            [
                evaluation(PRUNE, (self.keys.stream(lane),), f"{max(cut, 0)}-0", most, int(dry_run))
                for lane in lanes
            ]
        )
        pruned: Counter[str] = Counter()
        for lane, count in zip(lanes, counts, strict=True):
            pruned[lane.topic] += int(count)
        return {topic: count for topic, count in pruned.items() if count}

    def close(self) -> None:
        """Close the broker's own connection."""
        self._link.disconnect()

    def _lanes(self, topics: Sequence[str]) -> list[Lane]:
        counts = self._topics.known(topics)
        return [Lane(topic, number) for topic in counts for number in range(counts[topic])]

    def _connect_checked(self, native: Mapping[str, Any]) -> Link:
        link = self._connect(native)
        try:
            server.check(link)
        except HoldfastError:
            link.disconnect()
            raise
        return link

    def _connect(self, native: Mapping[str, Any], **options: Any) -> Link:
        make = connections(self._url, {**self._native, **native})
        return Link(make, self.name, self._clock, **options)
