"""The default driver: kafka-python, in pure Python."""

from holdfast.brokers.kafka.pure.driver import PureDriver

__all__ = ["PureDriver"]
