"""Questions about the cluster, through kafka-python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka import TopicPartition
from kafka.admin import (
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    OffsetSpec,
    OffsetTimestamp,
)
from kafka.errors import KafkaError, KafkaTimeoutError, TopicAlreadyExistsError

from holdfast.brokers.kafka.diagnosis import unreachable
from holdfast.brokers.kafka.driver import Extent
from holdfast.brokers.kafka.pure.faults import translated, translation
from holdfast.brokers.kafka.pure.loop import Network
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from holdfast.brokers.kafka.settings import KafkaSettings
    from holdfast.ports import Lane

_LARGEST = "max.message.bytes"


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


class PureAdmin:
    """A thin layer over `KafkaAdminClient`, whose methods any thread may call."""

    def __init__(self, configs: Mapping[str, Any], settings: KafkaSettings) -> None:
        self._milliseconds = int(settings.timeout * 1000)
        configs = {"request_timeout_ms": self._milliseconds, **configs}
        self._client: Any = connected(KafkaAdminClient, configs, Network())

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
        asked = ConfigResource(ConfigResourceType.TOPIC, topic, [_LARGEST])
        try:
            answer = self._client.describe_configs([asked], config_filter="all")
            return int(answer["topic"][topic][_LARGEST]["value"])
        except (KafkaError, LookupError, TypeError, ValueError):
            return None  # not every user may ask, nor every server answer

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, Extent]:
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
            lane: Extent(
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

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def _known(committed: Any) -> int | None:
    return None if committed is None or committed.offset < 0 else int(committed.offset)
