"""Kafka and what speaks its protocol, through kafka-python or confluent-kafka."""

from holdfast.brokers.kafka.broker import KafkaBroker

__all__ = ["KafkaBroker"]
