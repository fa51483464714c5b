"""The fast driver: confluent-kafka, over librdkafka."""

from holdfast.brokers.kafka.confluent.driver import ConfluentDriver

__all__ = ["ConfluentDriver"]
