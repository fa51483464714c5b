"""Holdfast: no message lost, no effect twice, order per key, every failure replayable."""

from holdfast.caps import Caps, Counts, Ordering, Pause, Settle
from holdfast.clock import Clock, SystemClock
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    DecodeFailed,
    DependencyDown,
    HoldfastError,
    InvalidMessage,
    InvalidUrl,
    MessageTooLarge,
    MissingExtra,
    PlanError,
    PoisonMessage,
    Remedy,
    StaleDelivery,
    Transient,
    UnknownScheme,
    UnknownTopic,
    Unsupported,
)
from holdfast.headers import Headers
from holdfast.ids import Uuid7, derived_id, new_id
from holdfast.message import Message, carry, current_message, handling
from holdfast.ports import Broker, Delivery, Lane, Listener, Published, Sink, Source
from holdfast.watermark import Watermark

__all__ = [
    "Broker",
    "BrokerDown",
    "Caps",
    "Clock",
    "ConfigurationError",
    "Counts",
    "DecodeFailed",
    "Delivery",
    "DependencyDown",
    "Headers",
    "HoldfastError",
    "InvalidMessage",
    "InvalidUrl",
    "Lane",
    "Listener",
    "Message",
    "MessageTooLarge",
    "MissingExtra",
    "Ordering",
    "Pause",
    "PlanError",
    "PoisonMessage",
    "Published",
    "Remedy",
    "Settle",
    "Sink",
    "Source",
    "StaleDelivery",
    "SystemClock",
    "Transient",
    "UnknownScheme",
    "UnknownTopic",
    "Unsupported",
    "Uuid7",
    "Watermark",
    "carry",
    "current_message",
    "derived_id",
    "handling",
    "new_id",
]
