"""NATS JetStream: topics as streams, groups with one owner per lane.

Settings of the NATS adapter; everything else belongs to the client library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.brokers.groups.broker import LateGroups, NoPrune, subscribed
from holdfast.brokers.groups.member import Subscription
from holdfast.brokers.nats.acks import AckSender
from holdfast.brokers.nats.connection import Address, Connection
from holdfast.brokers.nats.consumers import LaneConsumers
from holdfast.brokers.nats.fetch import PullIntake
from holdfast.brokers.nats.jetstream import JetStream
from holdfast.brokers.nats.membership import GroupBucket, NatsGroup
from holdfast.brokers.nats.progress import NatsProgress
from holdfast.brokers.nats.sink import NatsSink
from holdfast.brokers.nats.source import NatsSource
from holdfast.brokers.nats.streams import NatsTopics
from holdfast.brokers.settings import converted, kinds, positive
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError, InvalidMessage, InvalidUrl
from holdfast.extras import driver
from holdfast.ids import new_id
from holdfast.ports import BrokerPowers, Caps, Counts, Ordering, Pause, Settle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.ports import GroupProgress, Lane, Listener, Sink, Source
    from holdfast.urls import BrokerUrl


_NUMBERS = ("partitions", "session", "lease", "dedup", "timeout", "max_message", "key_window")
_OURS = (
    "servers", "allow_reconnect", "max_reconnect_attempts", "reconnect_time_wait",
    "reconnect_to_server_handler",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """What can be set; the same names but `stream` work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    lease: float = 30.0
    """Seconds that a delivery may stay unsettled before it is handed out again (ack_wait)."""
    dedup: float = 120.0
    """Seconds within which a message id is stored once (duplicate_window of new streams)."""
    timeout: float = 5.0
    """Seconds that the server may take to answer."""
    max_message: int = 1_048_576
    """Bytes of payload and headers; the server's own max_payload bounds it, too."""
    key_window: int = 1
    """Messages of one key that may be on their way to the server at once.

    With more, few keys of many messages are published faster, and a key may lose its order
    when the server refuses one of its messages and takes the next.
    """
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    domain: str = ""
    """The JetStream domain, where there are several."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of new streams, as the server spells it, e.g. {"num_replicas": 3}."""

    def __post_init__(self) -> None:
        positive(self, *_NUMBERS)

    @classmethod
    def split(
        cls, options: Mapping[str, str], native: Mapping[str, Any]
    ) -> tuple[NatsSettings, dict[str, Any]]:
        """Return our settings in *options* (the URL's) and *native*, and the client's own."""
        known = kinds(cls, but="stream")
        if unknown := sorted(options.keys() - known.keys()):
            raise ConfigurationError(
                f"NATS URLs have no setting {', '.join(unknown)}; they have "
                f"{', '.join(known)}; pass settings of the client library as keywords"
            )
        given = {**options, **{name: native[name] for name in native if name in known}}
        own = {name: converted(name, value, known[name]) for name, value in given.items()}
        own["stream"] = native.get("stream", {})
        theirs = {name: native[name] for name in native if name not in {*known, "stream"}}
        return cls(**own), client_only(theirs)


def client_only(native: Mapping[str, Any]) -> dict[str, Any]:
    """Return *native*, unless it takes over what the adapter itself must decide."""
    if taken := [name for name in _OURS if name in native]:
        raise ConfigurationError(
            f"{', '.join(taken)}: the adapter connects and reconnects by itself, so that what a "
            "lost connection had not yet sent is never sent late; leave the setting out"
        )
    return dict(native)


_A_YEAR = 365 * 86_400.0
_MOST_HEADERS = 65_535  # what JetStream stores
_PORT = 4222


class NatsBroker(LateGroups, NoPrune, BrokerPowers):
    """A NATS server, or several of one cluster, with JetStream."""

    tells_progress = True
    prune_instead = ("NATS", "its streams delete by max_age, max_msgs and max_bytes: stream={…}")

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
            topics = NatsTopics(jetstream, self._settings)
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
        subscribed(topics, group)
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
        streams = NatsTopics(jetstream, settings)
        lanes = {topic: streams.lanes(topic) for topic in topics}
        subscription = Subscription(
            group=group, member=new_id(), topics=tuple(lanes), session=settings.session
        )
        courier = AckSender(connection, clock, settings.timeout)
        intake = PullIntake(connection, courier, jetstream, clock)
        consumers = LaneConsumers(
            jetstream, intake, courier, group=group, lease=settings.lease, clock=clock
        )
        return NatsSource(
            connection,
            NatsGroup(self._groups(jetstream), consumers, subscription, lanes, clock),
            intake,
            courier,
            caps=self.caps,
            timeout=settings.timeout,
            listener=listener,
        )

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its lanes."""
        if not topic:
            raise InvalidMessage("topic is empty: name the topic to create")
        if partitions < 1:
            raise ConfigurationError(f"partitions={partitions}: a topic needs at least 1")
        streams = NatsTopics(self._jetstream(self._shared()), self._settings)
        if streams.find(topic) is None:
            streams.create(topic, partitions)

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return self._settings.partitions

    def topics(self) -> Mapping[str, int]:
        """Return all topics with the number of their lanes; streams of others are left out."""
        return NatsTopics(self._jetstream(self._shared()), self._settings).all()

    def _introduce(self, topic: str, group: str) -> None:
        """Make sure that *topic* exists: its stream keeps messages for groups yet to come."""
        del group
        NatsTopics(self._jetstream(self._shared()), self._settings).lanes(topic)

    def _has_topic(self, topic: str) -> bool:
        return NatsTopics(self._jetstream(self._shared()), self._settings).find(topic) is not None

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        return self._progress(group).lag(topics)

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far *group* is; positions are sequences of the stream that holds the topic."""
        return self._progress(group).of(topics, self.name)

    def retention(self, topics: Collection[str]) -> Mapping[str, float]:
        """Return `max_age` of the streams that have one."""
        return NatsTopics(self._jetstream(self._shared()), self._settings).retention(topics)

    def _progress(self, group: str) -> NatsProgress:
        jetstream = self._jetstream(self._shared())
        streams = NatsTopics(jetstream, self._settings)
        return NatsProgress(jetstream, streams, self._groups(jetstream), group)

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

    def _groups(self, jetstream: JetStream) -> GroupBucket:
        return GroupBucket(jetstream, int(self._settings.stream.get("num_replicas", 1)))
