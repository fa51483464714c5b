"""`kafka://host:port[,host:port]` and `kafka+confluent://…`: Kafka, or what speaks its protocol.

On the wire a message is a record: its key and payload are the record's own, null and empty
told apart, and its attributes are CloudEvents headers (`ce_id`, `ce_type`, …) ahead of the
message's own headers, which are kept as they are; for null header values see `nulls`.
Records of others, without such headers, are taken, too.

A key belongs to the partition that the Java client gives it (murmur2), whichever driver
publishes. Keyless messages go where the client likes.

Settings of the adapter, and the ones that go to the client library untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups.broker import LateGroups, NoPrune, subscribed
from holdfast.brokers.kafka.cluster import Cluster
from holdfast.brokers.kafka.sink import KafkaSink
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.brokers.settings import converted
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, InvalidUrl, UnknownTopic
from holdfast.extras import driver as imported
from holdfast.ports import BrokerPowers, Caps, Ordering, Pause, Settle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.brokers.kafka.driver import Driver
    from holdfast.ports import GroupProgress, Lane, Listener, Sink, Source, TopicSettings
    from holdfast.urls import BrokerUrl


DRIVERS = ("kafka-python", "confluent")
_PORT = 9092
_OWN = {
    "driver": str,
    "timeout": float,
    "publish_within": float,
    "commit_every": float,
    "renew_after": float,
    "auto_create": bool,
    "partitions": int,
    "replication_factor": int,
}
_OF_TOPICS = "topic."


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """What the adapter itself can be told; the same names work as `?name=value` in the URL."""

    driver: str = DRIVERS[0]
    """Which client library: kafka-python or confluent (the scheme `kafka+confluent` too)."""
    timeout: float = 10.0
    """Seconds within which the broker must answer a question or a commit."""
    publish_within: float = 30.0
    """Seconds within which a batch must be acknowledged; then it counts as `BrokerDown`."""
    commit_every: float = 1.0
    """Seconds between commits while messages are settled; a crash repeats what came after."""
    renew_after: float = 30.0
    """Seconds without progress, though there is something to read, until a client is made anew."""
    auto_create: bool = False
    """Whether a topic that is missing is made when it is first used; else it is `UnknownTopic`."""
    partitions: int = 1
    """Of topics that are made so."""
    replication_factor: int | None = None
    """Of every topic that is made; the cluster's own unless set."""
    topic: Mapping[str, str] = field(default_factory=dict)
    """Settings of every topic that is made; in the URL each with `topic.` before its name."""
    servers: tuple[str, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    native: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For the client library, as given."""
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the client library, from the URL: text, whatever the setting's type."""

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise ConfigurationError(f"driver={self.driver!r}: use {' or '.join(DRIVERS)}")
        for name in ("timeout", "publish_within", "renew_after"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use more than 0 seconds")
        for name in ("partitions", "replication_factor"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigurationError(f"{name}={count!r}: use 1 or more")
        if self.commit_every < 0:
            raise ConfigurationError(f"commit_every={self.commit_every!r}: use 0 or more seconds")

    @classmethod
    def read(cls, url: BrokerUrl, native: Mapping[str, Any]) -> KafkaSettings:
        """Return the settings in *url* and *native*; keywords win over the URL's query."""
        if url.path.strip("/"):
            raise InvalidUrl(f"{url} has a path: name topics where you publish and consume")
        texts, keywords = dict(url.options), dict(native)
        own: dict[str, Any] = {}
        for name, kind in _OWN.items():
            given = [source.pop(name) for source in (texts, keywords) if name in source]
            if given:
                own[name] = converted(name, given[-1], kind)
        all_given = {**texts, **keywords}
        of_topics = [name for name in all_given if name.startswith(_OF_TOPICS)]
        own["topic"] = {name.removeprefix(_OF_TOPICS): str(all_given[name]) for name in of_topics}
        for name in of_topics:
            texts.pop(name, None)
            keywords.pop(name, None)
        if variant := url.scheme.partition("+")[2]:
            own["driver"] = variant
        return cls(
            servers=tuple(_address(host, url) for host in url.hosts) or _none(url),
            username=url.username,
            password=url.password,
            native=keywords,
            texts=texts,
            **own,
        )


def _none(url: BrokerUrl) -> tuple[str, ...]:
    raise InvalidUrl(f"{url} names no server: write kafka://host:{_PORT}")


def _address(host: str, url: BrokerUrl) -> str:
    """Return *host* with a port, an IPv6 address in its brackets."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{_PORT}"
    if not name or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidUrl(f"{url}: {host!r} is no server: write host:port, port from 1 to 65535")
    return host


class KafkaBroker(LateGroups, NoPrune, BrokerPowers):
    """One cluster through one of two client libraries, chosen by scheme or `driver=`.

    Settings other than the adapter's own go to the client under the client's own names,
    from here to all its parts, from `sink` and `source` to that one.
    """

    tells_progress = True
    prune_instead = ("Kafka", "it deletes by retention.ms and retention.bytes of the topic")

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        self.name = str(url)
        self._clock = clock
        self._settings = KafkaSettings.read(url, native)
        self._driver = _driver(self._settings, clock)
        self._cluster = Cluster(self._driver.admin, clock, self._settings)
        self.caps = Caps(
            settle=Settle.CUMULATIVE,
            ordering=Ordering.PARTITION,
            release_keeps_order=True,
            pause=Pause.LANE,
            transactions=True,
            fencing=True,
            max_message=self._driver.limit({}),
            replay=True,
            late_groups=True,
        )

    def sink(self, *, transactional_id: str | None = None, **native: Any) -> Sink:
        """Return a new sink; with a transactional id its batches are stored whole or not at all.

        Two live sinks must not share a transactional id: the elder one is fenced off.
        """
        with self._cluster.admin():  # a wrong address or password shows here
            pass
        return KafkaSink(
            lambda: self._driver.producer(native, transactional_id),
            self._cluster,
            replace(self.caps, max_message=self._driver.limit(native)),
            self._clock,
            seconds=self._settings.publish_within,
            transactional=transactional_id is not None,
            compresses=self._driver.compresses(native),
        )

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
        for topic in topics:
            self._cluster.lanes(topic, make=self._settings.auto_create)
        return KafkaSource(
            lambda rebalance: self._driver.member(topics, group, rebalance, native),
            self._cluster,
            group,
            self.caps,
            self._clock,
            self._settings,
            listener,
            topics[0],
        )

    @property
    def default_partitions(self) -> int:
        """How many partitions a topic gets that is made when first used."""
        return self._settings.partitions

    def topics(self) -> Mapping[str, int]:
        """Return all topics but Kafka's own, each with the number of its partitions."""
        with self._cluster.admin() as admin:
            return admin.topics()

    def servers(self) -> int:
        """Return how many brokers the cluster has now."""
        with self._cluster.admin() as admin:
            return admin.servers()

    def settings(self, topics: Collection[str]) -> Mapping[str, TopicSettings]:
        """Return how many copies *topics* keep, and how many must be up to date."""
        with self._cluster.admin() as admin:
            return admin.settings(topics)

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its partitions."""
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        self._cluster.create(topic, partitions)

    def create_larger(self, topic: str, *, like: str, more: int) -> None:
        """Make sure that *topic* exists; a new one takes *more* bytes a message than *like*.

        An existing one is left as it is, and where the cluster does not tell the limit of
        *like*, the new one has the cluster's own.
        """
        try:
            largest = self._cluster.topic(like).largest
        except UnknownTopic:
            largest = None
        self._cluster.create(topic, 1, None if largest is None else largest + more)

    def larger_sink(self, more: int) -> Sink:
        """Return a sink whose messages may have *more* bytes than those of the others."""
        return self.sink(**self._driver.larger(more))

    def _introduce(self, topic: str, group: str) -> None:
        """Make sure that *topic* exists: its log keeps messages for groups yet to come."""
        del group
        self._cluster.lanes(topic)

    def _has_topic(self, topic: str) -> bool:
        return self._cluster.exists(topic)

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the distance from what *group* committed to the end, of every lane.

        Gaps that no message fills (compacted records, markers of transactions) count, too.
        """
        lanes = [lane for topic in topics for lane in self._cluster.lanes(topic)]
        return {lane: extent.lag for lane, extent in self._cluster.extents(group, lanes).items()}

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far *group* is: its offsets, its members, and how long topics keep messages.

        The age of a lag is read from the record at the committed offset.
        """
        return self._cluster.progress(group, topics, self.name)

    def retention(self, topics: Collection[str]) -> Mapping[str, float]:
        """Return `retention.ms` of those topics that delete by it."""
        return self._cluster.retention(topics)

    def ends(self, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the offset that the next message of every lane gets."""
        lanes = [lane for topic in topics for lane in self._cluster.lanes(topic)]
        extents = self._cluster.extents(None, lanes)
        return {lane: extent.end for lane, extent in extents.items()}

    def close(self) -> None:
        """Close the broker's own connection."""
        self._cluster.close()


def _driver(settings: KafkaSettings, clock: Clock) -> Driver:
    """Import the client library only now: the module itself works without any."""
    if settings.driver == "confluent":
        imported("confluent_kafka", extra="confluent")
        from holdfast.brokers.kafka.confluent import ConfluentDriver

        return ConfluentDriver(settings, clock)
    from holdfast.brokers.kafka.kafka_python import KafkaPythonDriver

    return KafkaPythonDriver(settings, clock)
