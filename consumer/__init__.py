"""The consumer runtime: polls, hands messages to their handlers, settles them."""

from holdfast.consumer.batches import Batches
from holdfast.consumer.consumer import Consumer
from holdfast.consumer.injection import Attempt
from holdfast.consumer.metrics import ConsumerMetrics
from holdfast.consumer.outcome import Ending, Outcome
from holdfast.consumer.schema import create_tables, metadata
from holdfast.consumer.settings import Order, Settings
from holdfast.consumer.single import Single
from holdfast.consumer.tally import Tally
from holdfast.effects import effect

__all__ = [
    "Attempt",
    "Batches",
    "Consumer",
    "ConsumerMetrics",
    "Ending",
    "Order",
    "Outcome",
    "Settings",
    "Single",
    "Tally",
    "create_tables",
    "effect",
    "metadata",
]
