"""`kafka://host:port[,host:port]` and `kafka+confluent://…`: Kafka, or what speaks its protocol.

On the wire a message is a record: its key and payload are the record's own, null and empty
told apart, and its attributes are CloudEvents headers (`ce_id`, `ce_type`, …) ahead of the
message's own headers, which are kept as they are; for null header values see `nulls`.
Records of others, without such headers, are taken, too.

A key belongs to the partition that the Java client gives it (murmur2), whichever driver
publishes. Keyless messages go where the client likes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups import named, no_prune
from holdfast.brokers.kafka.cluster import Cluster
from holdfast.brokers.kafka.settings import KafkaSettings
from holdfast.brokers.kafka.sink import KafkaSink
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.caps import Caps, Ordering, Pause, Settle
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, UnknownTopic
from holdfast.extras import driver as imported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.kafka.driver import Driver
    from holdfast.ports import Lane, Listener, Sink, Source
    from holdfast.urls import BrokerUrl


class KafkaBroker:
    """One cluster through one of two client libraries, chosen by scheme or `driver=`.

    Settings other than the adapter's own go to the client under the client's own names,
    from here to all its parts, from `sink` and `source` to that one.
    """

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
        if isinstance(topics, str) or not topics or not group:
            raise ConfigurationError(
                f"source(topics={topics!r}, group={group!r}): name a list of topics and a group"
            )
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

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that *topic* exists: its log keeps messages for groups yet to come."""
        named(topic, group)
        self._cluster.lanes(topic)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *topic* exists: a new group starts at its beginning."""
        named(topic, group)
        return self._cluster.exists(topic)

    def prune(
        self,
        topics: Sequence[str] | None = None,
        *,
        older_than: float,
        most: int = 10_000,
        dry_run: bool = False,
    ) -> Mapping[str, int]:
        """Refuse: messages end in another way here."""
        del topics, older_than, most, dry_run
        raise no_prune("Kafka", "it deletes by retention.ms and retention.bytes of the topic")

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the distance from what *group* committed to the end, of every lane.

        Gaps that no message fills (compacted records, markers of transactions) count, too.
        """
        lanes = [lane for topic in topics for lane in self._cluster.lanes(topic)]
        return {lane: extent.lag for lane, extent in self._cluster.extents(group, lanes).items()}

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
    from holdfast.brokers.kafka.pure import PureDriver

    return PureDriver(settings, clock)
