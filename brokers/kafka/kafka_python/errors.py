"""kafka-python's errors, in terms of what to do about them."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kafka import errors as kafka

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

_WRONG_SETTINGS = (
    kafka.AuthorizationError,
    kafka.IllegalSaslStateError,
    kafka.InconsistentGroupProtocolError,
    kafka.InvalidGroupIdError,
    kafka.InvalidSessionTimeoutError,
    kafka.InvalidTransactionTimeoutError,
    kafka.KafkaConfigurationError,
    kafka.PolicyViolationError,
    kafka.SaslAuthenticationFailedError,
    kafka.UnsupportedSaslMechanismError,
    kafka.UnsupportedVersionError,
)
_GONE = (
    kafka.CommitFailedError,
    kafka.FencedInstanceIdError,
    kafka.IllegalGenerationError,
    kafka.UnknownMemberIdError,
)
_CODEC = re.compile(r"Libraries for (\w+) compression codec")
FENCED = (kafka.InvalidProducerEpochError, kafka.ProducerFencedError)


def translation(error: BaseException, doing: str) -> HoldfastError:
    """Return what *error* means for whoever was *doing* something."""
    text = f"{doing}: {type(error).__name__}: {error}"
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, FENCED):
        return FencedOff(f"{text}; another sink uses the same transactional_id")
    if isinstance(error, kafka.UnsupportedCodecError):
        return _codec_missing(error)
    if isinstance(error, _WRONG_SETTINGS):
        return ConfigurationError(text)
    if isinstance(error, _GONE):
        return StaleDelivery(text)
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return UnknownTopic(str(error), "create it with broker.create_topic()")
    if isinstance(
        error, (kafka.InvalidTopicError, kafka.InvalidRecordError, kafka.InvalidTimestampError)
    ):
        return InvalidMessage(text)
    return BrokerDown(text)


def _codec_missing(error: BaseException) -> HoldfastError:
    found = _CODEC.search(str(error))
    if found is None:
        return ConfigurationError(f"a message is compressed in a way unknown here: {error}")
    return ConfigurationError(
        f"a message is compressed with {found[1]}, whose library is not installed: run  "
        "pip install 'holdfast[kafka]'  to read it"
    )


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn kafka-python's errors into Holdfast's."""
    try:
        yield
    except kafka.KafkaError as error:
        raise translation(error, doing) from error
