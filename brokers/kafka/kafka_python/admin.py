"""Questions about the cluster, through kafka-python."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kafka import KafkaConsumer, TopicPartition
from kafka.admin import (
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    OffsetSpec,
    OffsetTimestamp,
)
from kafka.errors import KafkaError, KafkaTimeoutError, TopicAlreadyExistsError

from holdfast.brokers.kafka.driver import (
    LEAST_IN_SYNC,
    GroupMembers,
    OffsetRange,
    kept_seconds,
    topic_settings,
)
from holdfast.brokers.kafka.errors import unreachable
from holdfast.brokers.kafka.kafka_python.errors import translated, translation
from holdfast.brokers.kafka.kafka_python.network import Network
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.client_log import ClientLog
    from holdfast.brokers.kafka.driver import Offsets
    from holdfast.ports import TopicSettings

_RETENTION = ("retention.ms", "cleanup.policy")
_STEP = 250  # milliseconds
_READ = 3000  # milliseconds that reading single records may take


def connected(make: Callable[..., Any], configs: Mapping[str, Any], network: Network) -> Any:
    """Return a new client of kafka-python's, or say why there is none."""
    try:
        return make(**configs, kafka_client=network)
    except KafkaTimeoutError as error:
        reason = network.complaint() or error
        network.close()
        raise _fault(reason, configs) from error
    except (KafkaError, ValueError, RuntimeError) as error:
        network.close()
        fault = translation(error, "connecting to Kafka")
        if not isinstance(error, KafkaError):
            fault = ConfigurationError(f"kafka-python refuses its settings: {error}")
        raise fault from error
    except BaseException:
        network.close()
        raise


def _fault(reason: Exception, configs: Mapping[str, Any]) -> HoldfastError:
    fault = translation(reason, "connecting to Kafka")
    if not isinstance(fault, BrokerDown):
        return fault
    tls = "SSL" in str(configs.get("security_protocol", ""))
    return unreachable(configs["bootstrap_servers"], str(reason), tls=tls)


class KafkaPythonAdmin:
    """A thin layer over `KafkaAdminClient`, whose methods any thread may call."""

    def __init__(
        self,
        configs: Mapping[str, Any],
        settings: KafkaSettings,
        reading: Mapping[str, Any],
        log: ClientLog,
    ) -> None:
        self._log = log
        self._milliseconds = int(settings.timeout * 1000)
        self._reading = reading
        configs = {"request_timeout_ms": self._milliseconds, **configs}
        self._client: Any = connected(KafkaAdminClient, configs, Network(log))

    def partitions(self, topic: str) -> list[int] | None:
        """Return the partitions of *topic*; None when it does not exist."""
        with translated(f"asking for topic {topic!r}"):
            [found] = self._client.describe_topics([topic])
        parts = [part["partition_index"] for part in found["partitions"]]
        return sorted(parts) if parts and not found["error_code"] else None

    def topics(self) -> dict[str, int]:
        """Return the topics but Kafka's own."""
        with translated("asking for the topics"):
            names = [name for name in self._client.list_topics() if not name.startswith("__")]
            found = self._client.describe_topics(names) if names else []
        return {about["name"]: len(about["partitions"]) for about in found}

    def servers(self) -> int:
        """Return how many brokers the cluster has now."""
        with translated("asking for the brokers"):
            return len(self._client.describe_cluster()["brokers"])

    def settings(self, topics: Collection[str]) -> dict[str, TopicSettings]:
        """Return the replication of *topics*; what is not told is left out."""
        with translated("asking for the topics"):
            known = self._client.describe_topics(list(topics)) if topics else []
        return {
            about["name"]: topic_settings(
                [(len(one["replica_nodes"]), len(one["isr_nodes"])) for one in about["partitions"]],
                self._config(about["name"], LEAST_IN_SYNC),
            )
            for about in known
            if about["partitions"]
        }

    def create(
        self, topic: str, partitions: int, replicas: int | None, configs: Mapping[str, str]
    ) -> None:
        """Create *topic* unless it exists."""
        wanted: dict[str, Any] = {"num_partitions": partitions}
        if replicas is not None:
            wanted["replication_factor"] = replicas
        if configs:
            wanted["configs"] = dict(configs)
        with translated(f"creating topic {topic!r}"):
            try:
                self._client.create_topics({topic: wanted}, timeout_ms=self._milliseconds)
            except TopicAlreadyExistsError:
                return

    def largest(self, topic: str) -> int | None:
        """Return the topic's own limit."""
        told = self._config(topic, "max.message.bytes")
        return None if told is None else int(told)

    def _config(self, topic: str, name: str) -> str | None:
        asked = ConfigResource(ConfigResourceType.TOPIC, topic, [name])
        try:
            answer = self._client.describe_configs([asked], config_filter="all")
            return str(int(answer["topic"][topic][name]["value"]))
        except (KafkaError, LookupError, TypeError, ValueError):
            return None  # not every user may ask, nor every server answer

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, OffsetRange]:
        """Return how far each lane reaches and how far *group* is."""
        parts = {lane: TopicPartition(*lane) for lane in lanes}
        with translated(f"asking for the offsets of group {group!r}"):
            committed: Any = {}
            if group is not None:
                committed = self._client.list_group_offsets({group: list(parts.values())})[group]
            first = self._client.list_partition_offsets(
                dict.fromkeys(parts.values(), OffsetSpec.EARLIEST)
            )
            end = self._client.list_partition_offsets(
                dict.fromkeys(parts.values(), OffsetSpec.LATEST),
                isolation_level="read_uncommitted" if group is None else "read_committed",
            )
        return {
            lane: OffsetRange(
                first=first[part].offset,
                end=end[part].offset,
                committed=_known(committed.get(part)),
            )
            for lane, part in parts.items()
        }

    def ends(self, lanes: Collection[Lane]) -> dict[Lane, int]:
        """Return up to where each lane can be read."""
        parts = {lane: TopicPartition(*lane) for lane in lanes}
        with translated("asking for the ends of lanes"):
            found = self._client.list_partition_offsets(
                dict.fromkeys(parts.values(), OffsetSpec.LATEST), isolation_level="read_committed"
            )
        return {lane: int(found[part].offset) for lane, part in parts.items()}

    def at_time(self, lane: Lane, milliseconds: int) -> int | None:
        """Return the first offset at or after a time."""
        part = TopicPartition(*lane)
        with translated(f"asking for a time in {lane}"):
            found = self._client.list_partition_offsets({part: OffsetTimestamp(milliseconds)})
        offset = int(found[part].offset)
        return None if offset < 0 else offset

    def committed_topics(self, group: str) -> set[str]:
        """Return the topics in which *group* has committed something."""
        with translated(f"asking for the offsets of group {group!r}"):
            found = self._client.list_group_offsets({group: None})[group]
        return {part.topic for part, offset in found.items() if _known(offset) is not None}

    def members(self, group: str) -> GroupMembers:
        """Return who is in *group*, as far as it is of the classic protocol."""
        with translated(f"asking for the members of group {group!r}"):
            found = self._client.describe_groups([group])[group]
        readers: Counter[str] = Counter()
        for member in found["members"]:
            assigned = member["member_assignment"] or {}
            readers.update(one["topic"] for one in assigned.get("assigned_partitions", ()))
        # Of a group of the newer protocol a server says here that it does not exist.
        count = None if found["group_state"] == "Dead" else len(found["members"])
        return GroupMembers(
            count=count, readers=readers, is_settled=found["group_state"] == "Stable"
        )

    def retention(self, topics: Collection[str]) -> dict[str, float]:
        """Return how long topics keep messages."""
        asked = [
            ConfigResource(ConfigResourceType.TOPIC, name, list(_RETENTION)) for name in topics
        ]
        try:
            answer = self._client.describe_configs(asked, config_filter="all")["topic"]
            found = {
                name: kept_seconds(*(facts[setting]["value"] for setting in _RETENTION))
                for name, facts in answer.items()
            }
        except (KafkaError, LookupError, TypeError, ValueError):
            return {}  # not every user may ask, nor every server answer
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def stored_at(self, offsets: Offsets) -> dict[Lane, float]:
        """Read one record of each lane, with a consumer that joins no group."""
        found: dict[Lane, float] = {}
        parts = {TopicPartition(*lane): offset for lane, offset in offsets.items()}
        with translated("reading the oldest messages of lanes"):
            reader: Any = connected(KafkaConsumer, self._reading, Network(self._log))
            try:
                reader.assign(list(parts))
                for part, offset in parts.items():
                    reader.seek(part, offset)
                for _ in range(_READ // _STEP):
                    for part, records in reader.poll(timeout_ms=_STEP).items():
                        reader.pause(part)
                        if records and records[0].timestamp >= 0:
                            found.setdefault(Lane(*part), records[0].timestamp / 1000)
                    if len(found) == len(parts):
                        break
            finally:
                reader.close()
        return found

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def _known(committed: Any) -> int | None:
    return None if committed is None or committed.offset < 0 else int(committed.offset)
