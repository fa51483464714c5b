"""How long events take from their transaction to the broker, as far as their ids tell."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.metrics import Instruments, histogram
from holdfast.stored_message import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message
    from holdfast.ports import Published

log = logging.getLogger("holdfast.outbox")

DUE = "outbox-due"
"""The header that says when a delayed event was due: it has waited only since then."""
MOST_LOOKED_AT = 64
"""Events of a batch that are looked at, spread over it: a histogram costs more than a row."""
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_UUID7 = "7"

PUBLISH = histogram(
    "holdfast_outbox_publish_seconds",
    "How long events waited for the broker, from when they were made, or due; of a large batch "
    "some are looked at",
    buckets=_BUCKETS,
)


class PublishLatency:
    """Notes the age of what the broker has just taken."""

    def __init__(self, registry: CollectorRegistry, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = Instruments(registry).histogram(PUBLISH)
        self._clock = clock

    def note(self, messages: Sequence[Message], results: Sequence[Published]) -> None:
        """Observe *messages*, those that were taken by their *results*."""
        if not messages:
            return
        now = self._clock.now().timestamp()
        step = -(-len(messages) // MOST_LOOKED_AT)
        for message, result in zip(messages[::step], results[::step], strict=True):
            made = None if result.error is not None else ready_at(message)
            if made is not None:
                self._seconds.observe(max(0.0, now - made))


def ready_at(message: Message) -> float | None:
    """Return when *message* could have left, in POSIX seconds; None if nothing tells.

    That is when its id was made, which is when it was staged, or when it was due.
    """
    if isinstance(message, StoredMessage) and DUE in message.packed:
        said = dict(message.wire).get(DUE)
        try:
            return None if said is None else datetime.fromisoformat(said.decode()).timestamp()
        except ValueError:  # a header of the caller's own
            return None
    own = message.id
    if own[14:15] != _UUID7:
        return None
    try:
        return int(own[:8] + own[9:13], 16) / 1000
    except ValueError:  # of somebody else's making
        return None


def _registered() -> PublishLatency:
    try:
        return PublishLatency(REGISTRY)
    except ValueError:
        log.warning("the application exports %s itself: Holdfast's is not shown", PUBLISH.name)
        return PublishLatency(CollectorRegistry())


LATENCY = _registered()
