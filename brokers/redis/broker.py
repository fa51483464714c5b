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

The names of the keys in Redis.

hf:topics                       hash    topic -> number of lanes
hf:{orders:0}                   stream  lane 0 of topic `orders`
hf:{orders:0}:billing:state     hash    `epoch`, `owner` = "<epoch> <member>", and `connection`:
                                        the number of the owner's one that may read
hf:{orders:0}:billing:lease     string  the owner, gone when it stayed silent for a session
hf:{orders:0}:billing:due       zset    pending entries not handed out now, by due time in ms
hf:{billing}:members            hash    member -> its topics, as a JSON list
hf:{billing}:alive:<member>     string  gone when the member stayed silent for a session
hf:{billing}:bell               stream  one entry, replaced whenever the group changes

The consumer group in Redis has the group's name, and `holdfast` is its one consumer: who may
read a lane is decided by the lane's owner, not by Redis.

Settings of the Redis adapter; everything else goes to redis-py untouched.

Which topics there are, and how many lanes each has for good.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from holdfast.brokers.groups.broker import LateGroups, subscribed
from holdfast.brokers.groups.member import Subscription
from holdfast.brokers.redis import connection
from holdfast.brokers.redis.connection import RedisConnection, connections, evaluation
from holdfast.brokers.redis.group import RedisGroup
from holdfast.brokers.redis.lane import LaneStore
from holdfast.brokers.redis.scripts import INTRODUCE, PRUNE
from holdfast.brokers.redis.sink import RedisSink
from holdfast.brokers.redis.source import RedisSource
from holdfast.brokers.redis.wakeup import StreamWaiter
from holdfast.brokers.settings import converted, kinds
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    InvalidMessage,
    InvalidUrl,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.ids import new_id
from holdfast.ports import (
    BrokerPowers,
    Caps,
    Counts,
    GroupProgress,
    Lane,
    Ordering,
    Pause,
    Settle,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.ports import Listener, Sink, Source
    from holdfast.urls import BrokerUrl


_TAG = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})  # a brace would end the hash tag


class LaneKeys(NamedTuple):
    """The keys of one lane for one group; they share a hash tag."""

    stream: str
    state: str
    lease: str
    due: str


class GroupKeys(NamedTuple):
    """The keys of one group."""

    members: str
    bell: str
    alive: str
    """Where the names of the keys that show who lives begin."""


class Keys:
    """Names keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.topics = f"{prefix}:topics"

    def stream(self, lane: Lane) -> str:
        """Return the stream of *lane*."""
        return f"{self.prefix}:{{{lane.topic.translate(_TAG)}:{lane.partition}}}"

    def lane(self, lane: Lane, group: str) -> LaneKeys:
        """Return the keys of *lane* for *group*."""
        stream = self.stream(lane)
        start = f"{stream}:{group}:"
        return LaneKeys(stream, start + "state", start + "lease", start + "due")

    def group(self, group: str) -> GroupKeys:
        """Return the keys of *group*."""
        start = f"{self.prefix}:{{{group.translate(_TAG)}}}:"
        return GroupKeys(start + "members", start + "bell", start + "alive:")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """What can be set; the same names work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    max_message: int = 1_048_576
    """Bytes of payload, key and headers."""
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    prefix: str = "hf"
    """What the name of every key starts with."""

    def __post_init__(self) -> None:
        for name in ("partitions", "session", "max_message"):
            value = getattr(self, name)
            if not value > 0 or math.isinf(value):
                raise ConfigurationError(f"{name}={value!r}: use a number above 0")
        if not self.prefix or "{" in self.prefix:
            raise ConfigurationError(f"prefix={self.prefix!r}: use a name without braces")

    @classmethod
    def split(
        cls, url: BrokerUrl, native: Mapping[str, Any]
    ) -> tuple[RedisSettings, str, dict[str, Any]]:
        """Return our settings, and the URL and the keywords that are left for redis-py."""
        known = kinds(cls)
        given = {**url.options, **native}
        own = {name: converted(name, given[name], known[name]) for name in known if name in given}
        parts = urlsplit(url.raw)
        query = parse_qsl(parts.query, keep_blank_values=True)
        left = urlencode([pair for pair in query if pair[0] not in known])
        rest = urlunsplit(parts._replace(query=left))
        _check(url)
        return cls(**own), rest, {name: native[name] for name in native if name not in known}


def _check(url: BrokerUrl) -> None:
    """Refuse what redis-py would ignore: it reads an odd database as 0, and one host only."""
    if len(url.hosts) != 1:
        raise InvalidUrl(f"{url}: name one server, as in redis://localhost:6379/0")
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise InvalidUrl(f"{url}: {database!r} is no database number, write e.g. /0")


class RedisTopics:
    """The register of topics; what was learned once is not asked again."""

    def __init__(self, link: RedisConnection, keys: Keys, settings: RedisSettings) -> None:
        self._link = link
        self._keys = keys
        self._settings = settings
        self._lanes: dict[str, int] = {}

    def lanes(self, topic: str) -> int:
        """Return the number of lanes of *topic*, which is made where that is allowed."""
        if (count := self._lanes.get(topic)) is not None:
            return count
        if topic not in self.known([topic]):
            if not self._settings.auto_create:
                raise UnknownTopic(topic, "create it with broker.create_topic(), or auto_create")
            self.create(topic, self._settings.partitions)
        return self.known([topic])[topic]

    def known(self, topics: Sequence[str]) -> dict[str, int]:
        """Return the number of lanes of those *topics* that exist."""
        unknown = [topic for topic in topics if topic not in self._lanes]
        if unknown:
            counts = self._link.call("HMGET", self._keys.topics, *unknown)
            self._lanes.update(
                {t: int(count) for t, count in zip(unknown, counts, strict=True) if count}
            )
        return {topic: self._lanes[topic] for topic in topics if topic in self._lanes}

    def all(self) -> list[str]:
        """Return the names of all topics."""
        return [name.decode() for name in self._link.call("HKEYS", self._keys.topics)]

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that *topic* exists; whoever comes first decides the number of lanes."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        self._link.call("HSETNX", self._keys.topics, topic, partitions)


class RedisBroker(LateGroups, BrokerPowers):
    """Topics with lanes by key, groups that share them, kept in Redis Streams."""

    tells_progress = True

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        self.name = str(url)
        self._settings, self._url, self._native = RedisSettings.split(url, native)
        self._clock = clock
        self.keys = Keys(self._settings.prefix)
        self._link = self._connect({})
        self._topics = RedisTopics(self._link, self.keys, self._settings)
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
        return RedisSink(link, self.keys, RedisTopics(link, self.keys, self._settings), self.caps)

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a new member of *group*, which starts at the beginning of *topics*."""
        subscribed(topics, group)
        link = self._connect_checked(native)
        register = RedisTopics(link, self.keys, self._settings)
        try:
            for topic in topics:
                register.lanes(topic)
        except HoldfastError:
            link.disconnect()
            raise
        subscription = Subscription(
            group=group, member=new_id(), topics=topics, session=self._settings.session
        )
        keys, clock = self.keys, self._clock
        ledger = LaneStore(link, keys, group, clock)
        return RedisSource(
            link,
            RedisGroup(link, keys, register, ledger, subscription, clock),
            ledger,
            StreamWaiter(self._connect(native, loads=()), link, clock),
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

    def _introduce(self, topic: str, group: str) -> None:
        """Note that *group* reads *topic* from its beginning: `prune` keeps it for the group."""
        lanes = [Lane(topic, number) for number in range(self._topics.lanes(topic))]
        self._link.calls(
            [evaluation(INTRODUCE, (self.keys.stream(lane),), group) for lane in lanes]
        )

    def _has_topic(self, topic: str) -> bool:
        return bool(self._topics.known([topic]))

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        ledger = LaneStore(self._link, self.keys, group, self._clock)
        return ledger.lags(self._lanes(topics))

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far *group* is; positions are ids of entries, which also tell their age.

        A topic keeps its messages until they are pruned, which spares what is not settled.
        """
        for topic in topics or ():
            if not self._has_topic(topic):
                raise UnknownTopic(topic, "there is nothing to lag behind in it")
        ledger = LaneStore(self._link, self.keys, group, self._clock)
        readers = self._readers(group)
        known = {lane.topic for lane in ledger.introduced(self._lanes(self._topics.all()))}
        if not known and not readers:
            raise UnknownGroup(group, self.name)
        asked = sorted(known | readers.keys()) if topics is None else topics
        return GroupProgress(
            lanes=ledger.progress(self._lanes(asked)),
            members={topic: readers[topic] for topic in asked},
        )

    def _readers(self, group: str) -> Counter[str]:
        """Return how many living members of *group* read each topic."""
        keys = self.keys.group(group)
        listed = self._link.call("HGETALL", keys.members)
        wanted = dict(zip(listed[::2], listed[1::2], strict=True))
        alive = self._link.calls([("EXISTS", keys.alive + name.decode()) for name in wanted])
        living = [
            topics for topics, is_alive in zip(wanted.values(), alive, strict=True) if is_alive
        ]
        return Counter(topic for topics in living for topic in json.loads(topics))

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

    def _connect_checked(self, native: Mapping[str, Any]) -> RedisConnection:
        link = self._connect(native)
        try:
            connection.check(link)
        except HoldfastError:
            link.disconnect()
            raise
        return link

    def _connect(self, native: Mapping[str, Any], **options: Any) -> RedisConnection:
        make = connections(self._url, {**self._native, **native})
        return RedisConnection(make, self.name, self._clock, **options)
