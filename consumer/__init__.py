"""The consumer runtime: polls, hands messages to their handlers, settles them."""

from typing import TYPE_CHECKING

from holdfast.consumer.attempt.outcome import HandlerOutcome
from holdfast.consumer.consumer import Consumer
from holdfast.consumer.handlers.arguments import Attempt
from holdfast.consumer.monitoring import ConsumerMetrics, Counters
from holdfast.consumer.own_loop import MessageHandler
from holdfast.consumer.scheduling.work import HandlerEnding
from holdfast.consumer.schema import create_tables, metadata
from holdfast.consumer.settings import Batches, Order, Settings
from holdfast.effects import effect
from holdfast.extras import lazily

if TYPE_CHECKING:
    from holdfast.consumer.parking.admin import ParkingAdmin
    from holdfast.consumer.shared_circuits import CircuitAdmin

__all__ = [
    "Attempt",
    "Batches",
    "CircuitAdmin",
    "Consumer",
    "ConsumerMetrics",
    "Counters",
    "HandlerEnding",
    "HandlerOutcome",
    "MessageHandler",
    "Order",
    "ParkingAdmin",
    "Settings",
    "create_tables",
    "effect",
    "metadata",
]

# What operators do is not needed to consume.
__getattr__ = lazily(
    __name__,
    {
        "parking.admin": "ParkingAdmin",
        "shared_circuits": "CircuitAdmin",
    },
)
