"""librdkafka's errors, in terms of what to do about them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    FencedOff,
    HoldfastError,
    InvalidMessage,
    StaleDelivery,
    UnknownTopic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

WRONG_SETTINGS = frozenset((
    KafkaError._AUTHENTICATION, KafkaError._INVALID_ARG, KafkaError._SSL,
    KafkaError._UNSUPPORTED_FEATURE, KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.INVALID_GROUP_ID, KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.INVALID_TRANSACTION_TIMEOUT, KafkaError.POLICY_VIOLATION,
    KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM,
))  # fmt: skip
GONE = frozenset((
    KafkaError._ASSIGNMENT_LOST, KafkaError.FENCED_INSTANCE_ID, KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH, KafkaError.UNKNOWN_MEMBER_ID,
))  # fmt: skip
FENCED = frozenset((
    KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED,
))  # fmt: skip
NO_TOPIC = frozenset((
    KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
))  # fmt: skip
TOO_LARGE = frozenset((
    KafkaError.INVALID_MSG_SIZE, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE,
))  # fmt: skip
BAD_RECORD = frozenset((
    KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP, KafkaError.TOPIC_EXCEPTION,
))  # fmt: skip


def translation(error: KafkaError, doing: str) -> HoldfastError:
    """Return what *error* means for whoever was *doing* something."""
    code = error.code()
    text = f"{doing}: {error.name()}: {error.str()}"
    if code in FENCED:
        return FencedOff(f"{text}; another sink uses the same transactional_id")
    if code in WRONG_SETTINGS:
        return ConfigurationError(text)
    if code in GONE:
        return StaleDelivery(text)
    if code in NO_TOPIC:
        return UnknownTopic(error.str(), "create it with broker.create_topic()")
    if code in BAD_RECORD:
        return InvalidMessage(text)
    return BrokerDown(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn librdkafka's errors into Holdfast's."""
    try:
        yield
    except KafkaException as error:
        raise translation(error.args[0], doing) from error
