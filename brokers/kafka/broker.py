"""`kafka://host:port[,host:port]` and `kafka+confluent://…`: Kafka, Redpanda, Event Hubs.

On the wire a message is a record: its key and payload are the record's own, null and empty
told apart, and its attributes are CloudEvents headers (`ce_id`, `ce_type`, …) ahead of the
message's own headers, which are kept as they are, null values included. Records without
such headers are taken, too.

A key belongs to the partition that the Java client gives it (murmur2), whichever driver
publishes. Keyless messages go where the client likes.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.brokers.kafka.settings import KafkaSettings
from holdfast.brokers.kafka.sink import KafkaSink
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.caps import Caps, Ordering, Pause, Settle
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, InvalidMessage, UnknownTopic
from holdfast.extras import driver as imported
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from holdfast.brokers.kafka.driver import Admin, Driver, Extent
    from holdfast.ports import Listener, Sink, Source
    from holdfast.urls import BrokerUrl

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CREATION_SECONDS = 2.0  # how long a broker that creates topics on first use may take


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
        self._admin: Admin | None = None
        self._topics: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()
        self.caps = Caps(
            settle=Settle.CUMULATIVE,
            ordering=Ordering.PARTITION,
            release_keeps_order=True,
            pause=Pause.LANE,
            transactions=True,
            max_message=self._driver.max_message,
            replay=True,
        )

    def sink(self, *, transactional_id: str | None = None, **native: Any) -> Sink:
        """Return a new sink; with a transactional id its batches are stored whole or not at all.

        Two live sinks must not share a transactional id: the elder one is fenced off.
        """
        with self.admined():  # a wrong address or password shows here
            pass
        return KafkaSink(
            lambda: self._driver.producer(native, transactional_id),
            self._exists,
            self.caps,
            self._clock,
            seconds=self._settings.publish_within,
            transactional=transactional_id is not None,
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
            self._existing(topic)
        return KafkaSource(
            lambda rebalance: self._driver.member(topics, group, rebalance, native),
            _Books(self, group),
            self.caps,
            self._clock,
            self._settings,
            listener,
        )

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its partitions."""
        _check_name(topic)
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        with self.admined() as admin:
            admin.create(topic, partitions)
            self._wait_for(admin, topic)
            self._topics.add(topic)

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the distance from what *group* committed to the end, of every lane.

        Gaps that no message fills (compacted records, markers of transactions) count, too.
        """
        lanes = [lane for topic in topics for lane in self._existing(topic)]
        with self.admined() as admin:
            return {lane: extent.lag for lane, extent in admin.extents(group, lanes).items()}

    def close(self) -> None:
        """Close the broker's own connection."""
        with self._lock:
            self._closed = True
            admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    @contextmanager
    def admined(self) -> Iterator[Admin]:
        """Lend the broker's connection; once it is closed, one for this purpose alone."""
        if self._closed:
            admin = self._driver.admin()
            try:
                yield admin
            finally:
                admin.close()
            return
        with self._lock:
            if self._admin is None:
                self._admin = self._driver.admin()
        yield self._admin

    def _existing(self, topic: str) -> list[Lane]:
        if (lanes := self._lanes(topic)) is None:
            raise UnknownTopic(topic, "create it with broker.create_topic()")
        return lanes

    def _exists(self, topic: str) -> bool:
        """Whether *topic* exists; asked once, for a deleted one the producer finds out."""
        if topic not in self._topics and self._lanes(topic) is not None:
            self._topics.add(topic)
        return topic in self._topics

    def _lanes(self, topic: str) -> list[Lane] | None:
        _check_name(topic)
        with self.admined() as admin:
            partitions = self._wait_for(admin, topic)
        return None if partitions is None else [Lane(topic, number) for number in partitions]

    def _wait_for(self, admin: Admin, topic: str) -> list[int] | None:
        """Return the partitions of *topic*, which asking for may have brought into being."""
        until = self._clock.monotonic() + _CREATION_SECONDS
        while (found := admin.partitions(topic)) is None and self._clock.monotonic() < until:
            self._clock.sleep(0.05)
        return found


class _Books:
    """The books of one group, read through the broker's own connection."""

    def __init__(self, broker: KafkaBroker, group: str) -> None:
        self._broker = broker
        self._group = group

    def extents(self, lanes: Collection[Lane]) -> dict[Lane, Extent]:
        """Return how far each of *lanes* reaches and how far the group is."""
        if not lanes:
            return {}
        with self._broker.admined() as admin:
            return admin.extents(self._group, lanes)

    def at_time(self, lane: Lane, milliseconds: int) -> int | None:
        """Return the first offset stored at or after a time."""
        with self._broker.admined() as admin:
            return admin.at_time(lane, milliseconds)


def _check_name(topic: str) -> None:
    if _NAME.fullmatch(topic) is None or topic in {".", ".."}:
        raise InvalidMessage(
            f"topic {topic!r}: use 1 to 249 ASCII letters, digits, dots, dashes and underscores"
        )


def _driver(settings: KafkaSettings, clock: Clock) -> Driver:
    """Import the client library only now: the module itself works without any."""
    if settings.driver == "confluent":
        imported("confluent_kafka", extra="confluent")
        from holdfast.brokers.kafka.confluent import ConfluentDriver

        return ConfluentDriver(settings, clock)
    imported("kafka", extra="kafka")
    from holdfast.brokers.kafka.pure import PureDriver

    return PureDriver(settings, clock)
