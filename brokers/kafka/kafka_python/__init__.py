"""The default driver: kafka-python, in pure Python."""

import warnings

from holdfast.extras import driver

with warnings.catch_warnings():
    # kafka-python reads its own files in a way that Python 3.11 deprecates; a program that
    # makes warnings errors could not import it.
    warnings.filterwarnings("ignore", r"(read|open)_text is deprecated", DeprecationWarning)
    driver("kafka", extra="kafka")
    from holdfast.brokers.kafka.kafka_python.driver import KafkaPythonDriver

__all__ = ["KafkaPythonDriver"]
