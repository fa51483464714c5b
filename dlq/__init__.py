"""Dead letters: captured whole, grouped by cause, triaged, and replayed safely."""

from typing import TYPE_CHECKING

from holdfast.dlq.capture.capture import CaptureSettings, capture
from holdfast.dlq.decorator import DeadLetters, dead_letter, dead_lettered
from holdfast.dlq.destination import DeadLetterDestination, DeadLetterStore
from holdfast.dlq.letter import DeadLetter, dead_letter_id, dlq_topic
from holdfast.dlq.protection.redaction import Redaction
from holdfast.dlq.replay import schema as _replay_tables  # noqa: F401 - part of the metadata
from holdfast.dlq.store.schema import create_tables, metadata
from holdfast.dlq.topic.topic import DeadLetterTopic
from holdfast.extras import lazily

if TYPE_CHECKING:
    from holdfast.dlq.operations import DeadLetterAdmin
    from holdfast.dlq.store.closing import close, closed, reopen

__all__ = [
    "CaptureSettings",
    "DeadLetter",
    "DeadLetterAdmin",
    "DeadLetterDestination",
    "DeadLetterStore",
    "DeadLetterTopic",
    "DeadLetters",
    "Redaction",
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

# What operators do is not needed where messages die.
__getattr__ = lazily(
    __name__,
    {
        "operations": "DeadLetterAdmin",
        "store.closing": "close closed reopen",
    },
)
