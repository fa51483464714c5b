"""The consumer runtime: polls, hands messages to their handlers, settles them."""

from holdfast.consumer.consumer import Consumer, Tally

__all__ = ["Consumer", "Tally"]
