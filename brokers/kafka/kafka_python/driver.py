"""kafka-python behind the driver protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient

from holdfast.brokers.kafka.client_log import ClientLog
from holdfast.brokers.kafka.driver import TOPIC_LIMIT, refuse
from holdfast.brokers.kafka.kafka_python.admin import KafkaPythonAdmin
from holdfast.brokers.kafka.kafka_python.consumer import KafkaPythonMember
from holdfast.brokers.kafka.kafka_python.producer import MAX_REQUEST, KafkaPythonProducer
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import Admin, GroupClient, Producer, Rebalance
    from holdfast.clock import Clock

_PARTS = (KafkaProducer, KafkaConsumer, KafkaAdminClient)


class KafkaPythonDriver:
    """Makes kafka-python's clients with the settings that keep Holdfast's promises."""

    name = "kafka-python"

    def __init__(self, settings: KafkaSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._log = ClientLog(clock)
        texts = {name: _typed(name, text) for name, text in settings.texts.items()}
        self._native = {**texts, **settings.native}
        unknown = [n for n in self._native if not any(n in part.DEFAULT_CONFIG for part in _PARTS)]
        if unknown:
            raise ConfigurationError(
                f"kafka-python has no setting {', '.join(unknown)}: see its documentation of "
                "KafkaProducer and KafkaConsumer, or use kafka+confluent:// for dotted names"
            )
        self._refuse(self._native)

    def limit(self, native: Mapping[str, Any]) -> int:
        """Return the largest message's bytes."""
        return int(self._for(KafkaProducer, native).get("max_request_size", MAX_REQUEST))

    def larger(self, more: int) -> dict[str, Any]:
        """Return the setting of a producer whose messages may have *more* bytes."""
        return {"max_request_size": max(self.limit({}), TOPIC_LIMIT) + more}

    def compresses(self, native: Mapping[str, Any]) -> bool:
        """Whether producers compress."""
        return self._for(KafkaProducer, native).get("compression_type") is not None

    def admin(self) -> Admin:
        """Return a connected admin."""
        reading = {
            "group_id": None,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
            **self._for(KafkaConsumer, {}),
            "max_partition_fetch_bytes": 1,  # a single batch comes in any case
        }
        configs = self._for(KafkaAdminClient, {})
        return KafkaPythonAdmin(configs, self._settings, reading, self._log)

    def producer(self, native: Mapping[str, Any], transactional_id: str | None) -> Producer:
        """Return an idempotent producer."""
        self._refuse(native)
        own: dict[str, Any] = {
            # Stated, since kafka-python drops idempotence silently when it is a mere default.
            "enable_idempotence": True,
            "acks": "all",
            # The sink drops a late batch whole; were the client to drop one message of a
            # key, a later one could still be stored.
            "delivery_timeout_ms": 10 * int(self._settings.publish_within * 1000) + 600_000,
        }
        if transactional_id is not None:
            own["transactional_id"] = transactional_id
        configs = {**own, **self._for(KafkaProducer, native)}
        return KafkaPythonProducer(configs, self._settings, self._clock, self._log)

    def member(
        self, topics: Sequence[str], group: str, rebalance: Rebalance, native: Mapping[str, Any]
    ) -> GroupClient:
        """Return a member of *group*."""
        self._refuse(native)
        own = {
            "group_id": group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        configs = {**own, **self._for(KafkaConsumer, native)}
        return KafkaPythonMember(configs, topics, rebalance, self._settings, self._clock, self._log)

    def _for(self, part: Any, native: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of one client: the broker's that it knows, and all of its own."""
        shared = {n: v for n, v in self._native.items() if n in part.DEFAULT_CONFIG}
        settings = self._settings
        own: dict[str, Any] = {
            "bootstrap_servers": list(settings.servers),
            "bootstrap_timeout_ms": int(settings.timeout * 1000),
            "reconnect_backoff_max_ms": 2000,
        }
        if settings.username is not None:
            own |= {
                "security_protocol": "SASL_SSL",  # no password in the clear unless asked for
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": settings.username,
                "sasl_plain_password": settings.password,
            }
        return {**own, **shared, **native}

    @staticmethod
    def _refuse(native: Mapping[str, Any]) -> None:
        refuse(native, "enable_auto_commit", False, "or unfinished messages would be lost")
        refuse(native, "acks", "all", "or acknowledged messages could be lost")
        for name in ("group_id", "transactional_id", "kafka_client", "bootstrap_servers"):
            if name in native:
                raise ConfigurationError(
                    f"{name} is not a setting here: the URL names servers, source() takes "
                    "group=, sink() takes transactional_id="
                )
        if not native.get("enable_idempotence", True) and (
            native.get("max_in_flight_requests_per_connection") != 1
        ):
            raise ConfigurationError(
                "enable_idempotence=False: retries would break the order of keys; leave it on, or "
                "set max_in_flight_requests_per_connection=1 as well"
            )


def _typed(name: str, text: str) -> Any:
    """Return *text* from a URL as the type that the setting has by default."""
    default = next((p.DEFAULT_CONFIG[name] for p in _PARTS if name in p.DEFAULT_CONFIG), None)
    if isinstance(default, bool):
        if text.lower() in {"true", "false"}:
            return text.lower() == "true"
        raise ConfigurationError(f"{name}={text!r}: write true or false")
    if isinstance(default, (int, float)) and name != "acks":
        try:
            return int(text)
        except ValueError as error:
            raise ConfigurationError(f"{name}={text!r}: write a number") from error
    return text
