"""NATS JetStream: topics as streams, groups with one owner per lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups import named, no_prune
from holdfast.brokers.nats.connection import Address, Connection
from holdfast.brokers.nats.courier import Courier
from holdfast.brokers.nats.group import Me
from holdfast.brokers.nats.holding import Holding, lag_of
from holdfast.brokers.nats.intake import Intake
from holdfast.brokers.nats.jetstream import JetStream
from holdfast.brokers.nats.membership import GroupStore, Membership
from holdfast.brokers.nats.names import consumer, subject, token
from holdfast.brokers.nats.settings import NatsSettings, client_only
from holdfast.brokers.nats.sink import NatsSink
from holdfast.brokers.nats.source import NatsSource
from holdfast.brokers.nats.standing import Standing
from holdfast.brokers.nats.topics import Topics
from holdfast.caps import Caps, Counts, Ordering, Pause, Settle
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, InvalidMessage, InvalidUrl, UnknownTopic
from holdfast.extras import driver
from holdfast.ids import new_id
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.ports import Listener, Sink, Source
    from holdfast.urls import BrokerUrl

_A_YEAR = 365 * 86_400.0
_MOST_HEADERS = 65_535  # what JetStream stores
_PORT = 4222


class NatsBroker:
    """A NATS server, or several of one cluster, with JetStream."""

    def __init__(self, url: BrokerUrl, *, clock: Clock = SYSTEM_CLOCK, **native: Any) -> None:
        driver("nats", extra="nats")
        if not url.hosts or url.path not in {"", "/"}:
            raise InvalidUrl(f"{url}: write nats://host:4222, or nats://one:4222,two:4222")
        self.name = str(url)
        self._settings, self._native = NatsSettings.split(url.options, native)
        self._url = url
        self._clock = clock
        self._own: Connection | None = None
        self.caps = Caps(
            settle=Settle.INDIVIDUAL,
            ordering=Ordering.PARTITION,
            counts=Counts.DELIVERY,
            delay=_A_YEAR,
            lease=self._settings.lease,
            pause=Pause.LANE,
            publish_dedup=self._settings.dedup,
            max_message=self._settings.max_message,
            max_headers=_MOST_HEADERS,
            replay=True,
            late_groups=True,
        )

    def sink(self, **native: Any) -> Sink:
        """Return a new sink with a connection of its own."""
        connection = self._connection(native)
        try:
            connection.ensure()
            jetstream = self._jetstream(connection)
            jetstream.check()
            topics = Topics(jetstream, self._settings)
            return NatsSink(connection, topics, self.caps, self._settings)
        except BaseException:
            connection.close()
            raise

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
        connection = self._connection(native)
        try:
            connection.ensure()
            return self._member(connection, topics, group, listener)
        except BaseException:
            connection.close()
            raise

    def _member(
        self,
        connection: Connection,
        topics: Sequence[str],
        group: str,
        listener: Listener | None,
    ) -> NatsSource:
        settings, clock = self._settings, self._clock
        jetstream = self._jetstream(connection)
        streams = Topics(jetstream, settings)
        me = Me(
            name=new_id(),
            topics={topic: streams.lanes(topic) for topic in topics},
            session=settings.session,
        )
        courier = Courier(connection, clock, settings.timeout)
        intake = Intake(connection, courier, jetstream, clock)
        membership = Membership(self._groups(jetstream), group, me, clock)
        holding = Holding(
            jetstream, intake, courier, group=group, lease=settings.lease, clock=clock
        )
        return NatsSource(
            connection,
            Standing(connection, membership, holding, listener),
            intake,
            courier,
            caps=self.caps,
            session=settings.session,
            timeout=settings.timeout,
            clock=clock,
        )

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its lanes."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        streams = Topics(self._jetstream(self._shared()), self._settings)
        if streams.find(topic) is None:
            streams.create(topic, partitions)

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return self._settings.partitions

    def topics(self) -> Mapping[str, int]:
        """Return all topics with the number of their lanes; streams of others are left out."""
        return Topics(self._jetstream(self._shared()), self._settings).all()

    def create_group(self, topic: str, group: str) -> None:
        """Make sure that *topic* exists: its stream keeps messages for groups yet to come."""
        named(topic, group)
        Topics(self._jetstream(self._shared()), self._settings).lanes(topic)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *topic* exists: every group starts at its beginning."""
        named(topic, group)
        return Topics(self._jetstream(self._shared()), self._settings).find(topic) is not None

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
        raise no_prune("NATS", "its streams delete by max_age, max_msgs and max_bytes: stream={…}")

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        jetstream = self._jetstream(self._shared())
        streams = Topics(jetstream, self._settings)
        state, _ = self._groups(jetstream).read(group)
        lags: dict[Lane, int] = {}
        for topic in topics:
            lanes = streams.find(topic)
            if lanes is None:
                raise UnknownTopic(topic, "there is nothing to lag behind in it")
            seeks = {n: entry.seeks for n, entry in enumerate(state.lanes.get(topic, []))}
            stored: dict[str, int] = {}
            for n in range(lanes):
                info = jetstream.consumer(token(topic), consumer(group, n, seeks.get(n, 0)))
                if info is None:  # the group has not come here yet
                    stored = stored or streams.counts(topic)
                    lags[Lane(topic, n)] = stored.get(subject(topic, n), 0)
                else:
                    lags[Lane(topic, n)] = lag_of(info)
        return lags

    def close(self) -> None:
        """Close the broker's own connection."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _shared(self) -> Connection:
        if self._own is None:
            self._own = self._connection({})
        self._own.ensure()
        return self._own

    def _connection(self, native: Mapping[str, Any]) -> Connection:
        url, options = self._url, {**self._native, **client_only(native)}
        if url.username is not None and url.password is None:
            options.setdefault("token", url.username)
        elif url.username is not None:
            options.setdefault("user", url.username)
            options.setdefault("password", url.password)
        hosts = [host if ":" in host else f"{host}:{_PORT}" for host in url.hosts]
        address = Address(
            servers=tuple(f"{url.scheme}://{host}" for host in hosts),
            shown=self.name,
            secure=url.scheme == "tls",
            options=options,
            timeout=self._settings.timeout,
        )
        return Connection(address, self._clock)

    def _jetstream(self, connection: Connection) -> JetStream:
        return JetStream(connection, domain=self._settings.domain, timeout=self._settings.timeout)

    def _groups(self, jetstream: JetStream) -> GroupStore:
        return GroupStore(jetstream, int(self._settings.stream.get("num_replicas", 1)))
