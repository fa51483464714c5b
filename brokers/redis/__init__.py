"""Redis Streams: lanes with one owner each, native pending lists, settles that are fenced."""

from holdfast.brokers.redis.broker import RedisBroker

__all__ = ["RedisBroker"]
