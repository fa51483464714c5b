"""Questions about the cluster, through confluent-kafka."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from holdfast.brokers.kafka.confluent.errors import (
    NO_TOPIC,
    WRONG_SETTINGS,
    translated,
    translation,
)
from holdfast.brokers.kafka.driver import (
    LEAST_IN_SYNC,
    GroupMembers,
    OffsetRange,
    kept_seconds,
    topic_settings,
)
from holdfast.brokers.kafka.errors import unreachable
from holdfast.errors import BrokerDown
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import Offsets
    from holdfast.ports import TopicSettings

_STEP = 0.25
_READ = 3.0  # seconds that reading single records may take
_READING = {
    "group.id": "holdfast-lag",  # wanted by the client; it neither joins nor commits
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "queued.min.messages": 1,
    "max.partition.fetch.bytes": 1,  # a single batch comes in any case
}
_Spec: Any = OffsetSpec  # half of it is untyped


class ConfluentAdmin:
    """A thin layer over `AdminClient`, whose methods any thread may call."""

    def __init__(self, configs: dict[str, Any], settings: KafkaSettings) -> None:
        self._seconds = settings.timeout
        self._configs = configs
        self._complaint: KafkaError | None = None
        with translated("making a Kafka client"):
            self._client = AdminClient(cast("Any", {**configs, "error_cb": self._hear}))
        self._connect(settings, tls="SSL" in str(configs.get("security.protocol", "")).upper())

    def _hear(self, error: KafkaError) -> None:
        if self._complaint is None or error.code() in WRONG_SETTINGS:
            self._complaint = error

    def _connect(self, settings: KafkaSettings, *, tls: bool) -> None:
        """Return once the cluster answers; librdkafka itself would try in silence for good."""
        left = settings.timeout
        while True:
            try:
                self._client.list_topics(timeout=min(_STEP, left))
            except KafkaException as error:
                reason = error.args[0]
            else:
                return
            self._client.poll(0)
            complaint = self._complaint
            if complaint is not None and complaint.code() in WRONG_SETTINGS:
                raise translation(complaint, "connecting to Kafka")
            left -= _STEP
            if left <= 0:
                text = str(complaint or reason)
                raise unreachable(settings.servers, text, tls=tls)

    def partitions(self, topic: str) -> list[int] | None:
        """Return the partitions of *topic*; None when it does not exist."""
        with translated(f"asking for topic {topic!r}"):
            found = self._client.list_topics(topic, timeout=self._seconds).topics.get(topic)
        if found is None or (found.error is not None and found.error.code() in NO_TOPIC):
            return None
        if found.error is not None:
            fault = translation(found.error, f"asking for topic {topic!r}")
            if isinstance(fault, BrokerDown):  # being created, its leader to be elected yet
                return None
            raise fault
        return sorted(found.partitions) or None

    def topics(self) -> dict[str, int]:
        """Return the topics but Kafka's own."""
        with translated("asking for the topics"):
            found = self._client.list_topics(timeout=self._seconds).topics
        own = {name: about for name, about in found.items() if not name.startswith("__")}
        return {name: len(about.partitions) for name, about in own.items()}

    def servers(self) -> int:
        """Return how many brokers the cluster has now."""
        with translated("asking for the brokers"):
            return len(self._client.list_topics(timeout=self._seconds).brokers)

    def settings(self, topics: Collection[str]) -> dict[str, TopicSettings]:
        """Return the replication of *topics*; what is not told is left out."""
        with translated("asking for the topics"):
            known = self._client.list_topics(timeout=self._seconds).topics
        return {
            topic: topic_settings(
                [(len(one.replicas), len(one.isrs)) for one in known[topic].partitions.values()],
                self._config(topic, LEAST_IN_SYNC),
            )
            for topic in topics
            if topic in known
        }

    def create(
        self, topic: str, partitions: int, replicas: int | None, configs: Mapping[str, str]
    ) -> None:
        """Create *topic* unless it exists."""
        with translated(f"creating topic {topic!r}"):
            new = NewTopic(
                topic,
                num_partitions=partitions,
                replication_factor=-1 if replicas is None else replicas,
                config=dict(configs),
            )
            [future] = self._client.create_topics([new], request_timeout=self._seconds).values()
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def largest(self, topic: str) -> int | None:
        """Return the topic's own limit."""
        told = self._config(topic, "max.message.bytes")
        return None if told is None else int(told)

    def _config(self, topic: str, name: str) -> str | None:
        asked = ConfigResource(ResourceType.TOPIC, topic)
        try:
            [answer] = self._client.describe_configs(
                [asked], request_timeout=self._seconds
            ).values()
            return str(int(answer.result()[name].value))
        except (KafkaException, LookupError, TypeError, ValueError):
            return None  # not every user may ask, nor every server answer

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, OffsetRange]:
        """Return how far each lane reaches and how far *group* is."""
        with translated(f"asking for the offsets of group {group!r}"):
            committed = {} if group is None else self._committed(group, lanes)
            first = self._ends(lanes, _Spec.earliest())
            end = self._ends(lanes, _Spec.latest(), committed=group is not None)
        return {
            lane: OffsetRange(
                first=first[lane],
                end=end[lane],
                committed=None if committed.get(lane, -1) < 0 else committed[lane],
            )
            for lane in lanes
        }

    def _committed(self, group: str, lanes: Collection[Lane]) -> dict[tuple[str, int], int]:
        # AdminClient.list_consumer_group_offsets ends the process with a segmentation fault while
        # the cluster has no coordinator for the group, so a consumer that never joins is asked.
        asked = [TopicPartition(*lane) for lane in lanes]
        member = Consumer(cast("Any", {**self._configs, "group.id": group}))
        try:
            found = member.committed(asked, timeout=self._seconds)
        finally:
            member.close()
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
        return {(place.topic, place.partition): place.offset for place in found}

    def ends(self, lanes: Collection[Lane]) -> dict[Lane, int]:
        """Return up to where each lane can be read."""
        with translated("asking for the ends of lanes"):
            found = self._ends(lanes, _Spec.latest(), committed=True)
        return {lane: found[lane] for lane in lanes}

    def at_time(self, lane: Lane, milliseconds: int) -> int | None:
        """Return the first offset at or after a time."""
        with translated(f"asking for a time in {lane}"):
            offset = self._ends([lane], OffsetSpec.for_timestamp(milliseconds))[lane]
        return None if offset < 0 else offset

    def committed_topics(self, group: str) -> set[str]:
        """Return the topics in which *group* has committed something, of all that there are."""
        lanes = [Lane(topic, n) for topic, count in self.topics().items() for n in range(count)]
        with translated(f"asking for the offsets of group {group!r}"):
            found = self._committed(group, lanes) if lanes else {}
        return {topic for (topic, _), offset in found.items() if offset >= 0}

    def members(self, group: str) -> GroupMembers:
        """Return who is in *group*."""
        with translated(f"asking for the members of group {group!r}"):
            [answer] = self._client.describe_consumer_groups(
                [group], request_timeout=self._seconds
            ).values()
            found = answer.result()
        readers: Counter[str] = Counter()
        for member in found.members:
            readers.update({part.topic for part in member.assignment.topic_partitions})
        is_dead = found.state == ConsumerGroupState.DEAD
        return GroupMembers(
            count=None if is_dead else len(found.members),
            readers=readers,
            is_settled=found.state == ConsumerGroupState.STABLE,
        )

    def retention(self, topics: Collection[str]) -> dict[str, float]:
        """Return how long topics keep messages."""
        asked = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        found: dict[str, float] = {}
        try:
            answers = self._client.describe_configs(asked, request_timeout=self._seconds)
            for resource, answer in answers.items():
                facts = answer.result()
                kept = kept_seconds(facts["retention.ms"].value, facts["cleanup.policy"].value)
                if kept is not None:
                    found[resource.name] = kept
        except (KafkaException, LookupError, TypeError, ValueError):
            return {}  # not every user may ask, nor every server answer
        return found

    def stored_at(self, offsets: Offsets) -> dict[Lane, float]:
        """Read one record of each lane, with a consumer that joins no group."""
        found: dict[Lane, float] = {}
        with translated("reading the oldest messages of lanes"):
            reader = Consumer(cast("Any", {**self._configs, **_READING}))
            try:
                reader.assign([TopicPartition(*lane, offset) for lane, offset in offsets.items()])
                for _ in range(round(_READ / _STEP)):
                    for record in reader.consume(len(offsets), _STEP):
                        self._note(record, found)
                    if len(found) == len(offsets):
                        break
            finally:
                reader.close()
        return found

    @staticmethod
    def _note(record: Any, found: dict[Lane, float]) -> None:
        kind, milliseconds = record.timestamp()
        if record.error() is None and kind != TIMESTAMP_NOT_AVAILABLE:
            found.setdefault(Lane(record.topic(), record.partition()), milliseconds / 1000)

    def _ends(
        self, lanes: Collection[Lane], spec: OffsetSpec, *, committed: bool = False
    ) -> dict[tuple[str, int], int]:
        asked = {TopicPartition(*lane): spec for lane in lanes}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        answers = self._client.list_offsets(
            asked, request_timeout=self._seconds, isolation_level=level
        )
        return {(p.topic, p.partition): answer.result().offset for p, answer in answers.items()}

    def close(self) -> None:
        """Let go of the client, which ends with its last reference."""
        del self._client
