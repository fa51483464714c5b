"""confluent-kafka behind the driver protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.brokers.kafka.client_log import LibrdkafkaLog
from holdfast.brokers.kafka.confluent.admin import ConfluentAdmin
from holdfast.brokers.kafka.confluent.consumer import ConfluentMember
from holdfast.brokers.kafka.confluent.producer import MAX_MESSAGE, ConfluentProducer
from holdfast.brokers.kafka.driver import TOPIC_LIMIT, refuse
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import Admin, GroupClient, Producer, Rebalance
    from holdfast.clock import Clock

_TIMEOUTS = ("message.timeout.ms", "delivery.timeout.ms")  # two names of one setting
_LINGER_MS = 500  # a timeout of the user's own must be longer, so it goes without
_OURS = ("bootstrap.servers", "metadata.broker.list", "group.id", "transactional.id")


class ConfluentDriver:
    """Makes confluent-kafka's clients with the settings that keep Holdfast's promises."""

    name = "confluent"

    def __init__(self, settings: KafkaSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._log = LibrdkafkaLog(clock)
        self._native = {**settings.texts, **settings.native}
        self._refuse(self._native)

    def limit(self, native: Mapping[str, Any]) -> int:
        """Return the largest message's bytes."""
        return int(self._with({}, native).get("message.max.bytes", MAX_MESSAGE))

    def larger(self, more: int) -> dict[str, Any]:
        """Return the setting of a producer whose messages may have *more* bytes."""
        return {"message.max.bytes": max(self.limit({}), TOPIC_LIMIT) + more}

    def compresses(self, native: Mapping[str, Any]) -> bool:
        """Whether producers compress; two names of one setting."""
        settings = self._with({}, native)
        names = ("compression.type", "compression.codec")
        return any(settings.get(name, "none") != "none" for name in names)

    def admin(self) -> Admin:
        """Return a connected admin."""
        return ConfluentAdmin(self._with({}, {}), self._settings)

    def producer(self, native: Mapping[str, Any], transactional_id: str | None) -> Producer:
        """Return an idempotent producer."""
        self._refuse(native)
        own: dict[str, Any] = {
            "enable.idempotence": True,
            "acks": "all",
            # The Java client's, and kafka-python's; librdkafka's own default is another.
            "partitioner": "murmur2_random",
        }
        if not any(name in native or name in self._native for name in _TIMEOUTS):
            # The sink drops a late batch whole; were the client to drop one message of a
            # key, a later one could still be stored.
            own["message.timeout.ms"] = 0
            # A sink flushes behind each batch, and a flush does not linger. Its thread that
            # sends is left alone until then: woken for a few messages each time, it would
            # need several times the CPU for the same batch.
            own["linger.ms"] = _LINGER_MS
        if transactional_id is not None:
            own["transactional.id"] = transactional_id
        elif not _is_off(self._with({}, native).get("enable.idempotence", True)):
            # By default librdkafka goes on behind a batch that was refused: what is sent again
            # because another message of that batch was bad would be overtaken.
            own["enable.gapless.guarantee"] = True
        return ConfluentProducer(self._with(own, native), self._settings, self._clock)

    def member(
        self, topics: Sequence[str], group: str, rebalance: Rebalance, native: Mapping[str, Any]
    ) -> GroupClient:
        """Return a member of *group*."""
        self._refuse(native)
        own = {
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }
        configs = self._with(own, native)
        return ConfluentMember(configs, topics, rebalance, self._settings, self._clock)

    def _with(self, own: Mapping[str, Any], native: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of one client; the ones given win over the adapter's."""
        settings = self._settings
        base: dict[str, Any] = {
            "bootstrap.servers": ",".join(settings.servers),
            "socket.timeout.ms": int(settings.timeout * 1000),
            "reconnect.backoff.max.ms": 2000,
            "logger": self._log,
        }
        if settings.username is not None:
            base |= {
                "security.protocol": "SASL_SSL",  # no password in the clear unless asked for
                "sasl.mechanism": "PLAIN",
                "sasl.username": settings.username,
                "sasl.password": settings.password,
            }
        return {**base, **own, **self._native, **native}

    @staticmethod
    def _refuse(native: Mapping[str, Any]) -> None:
        for name in ("enable.auto.commit", "enable.auto.offset.store"):
            refuse(native, name, False, "or unfinished messages would be lost")
        for name in ("acks", "request.required.acks"):
            if str(native.get(name, "all")) not in {"all", "-1"}:
                refuse(native, name, "all", "or acknowledged messages could be lost")
        for name in _OURS:
            if name in native:
                raise ConfigurationError(
                    f"{name} is not a setting here: the URL names servers, source() takes "
                    "group=, sink() takes transactional_id="
                )
        off = _is_off(native.get("enable.idempotence", True))
        flights = native.get("max.in.flight", native.get("max.in.flight.requests.per.connection"))
        if off and str(flights) != "1":
            raise ConfigurationError(
                "enable.idempotence=False: retries would break the order of keys; leave it on, or "
                "set max.in.flight=1 as well"
            )


def _is_off(value: Any) -> bool:
    return str(value).lower() == "false"
