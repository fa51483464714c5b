"""Dead letters: captured whole, grouped by cause, triaged, and replayed safely."""

from holdfast.dlq.capture import Origin, capture
from holdfast.dlq.closing import close, closed, reopen
from holdfast.dlq.homes import Home
from holdfast.dlq.layer import DeadLetters, dead_letter, dead_lettered
from holdfast.dlq.letter import DeadLetter, dead_letter_id, dlq_topic
from holdfast.dlq.redaction import Redaction
from holdfast.dlq.replay import schema as _replay_tables  # noqa: F401 - part of the metadata
from holdfast.dlq.schema import create_tables, metadata
from holdfast.dlq.store import StoreHome
from holdfast.dlq.topic import TopicHome

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "Home",
    "Origin",
    "Redaction",
    "StoreHome",
    "TopicHome",
    "capture",
    "close",
    "closed",
    "create_tables",
    "dead_letter",
    "dead_letter_id",
    "dead_lettered",
    "dlq_topic",
    "metadata",
    "reopen",
]
