"""The reader: the message of a delivery as this consumer handles it, whatever it says."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.headers import Headers
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally
    from holdfast.headers import Pair
    from holdfast.ports import Delivery

log = logging.getLogger("holdfast.consumer")


class Reader:
    """Gives a message its correlation, where it has none. The same one each time it is read."""

    def __init__(self, settings: Settings, tally: Tally, metrics: ConsumerMetrics) -> None:
        self._settings = settings
        self._tally = tally
        self._metrics = metrics
        self._marked: set[str] = set()
        self._uncorrelated: set[str] = set()

    def correlated(self, message: Message) -> Message:
        """Start a correlation where there is none, and say so."""
        if message.correlation_id is not None or self._settings.strict:
            return message
        self._tally.add("uncorrelated")
        if message.topic not in self._uncorrelated:
            self._uncorrelated.add(message.topic)
            log.warning("messages of %s come without a correlation id: their own id serves as one "
                        "(strict=True refuses them)", message.topic)  # fmt: skip
        return message.with_(correlation_id=message.id)

    def ordinary(self, message: Message, topic: str) -> Message:
        """Return *message* without marks of a replay that do not count, and say so."""
        self._tally.add("unmarked")
        self._metrics.count(topic, "unmarked")
        if topic not in self._marked:
            self._marked.add(topic)
            log.warning("message %s of %s has marks of a replay that sent no such message, and so "
                        "may others: they are handled as ordinary ones. Does a service copy the "
                        "headers of what it reads?", message.id, topic)  # fmt: skip
        return message.ordinary()

    def parked(self, origin: Delivery, topic: str) -> tuple[Message, Exception | None]:
        """Return the message of a parked *origin*, and why it cannot be handled, if so."""
        try:
            message = origin.message.ordinary()  # no replay is ever parked
            if message.correlation_id is None and not self._settings.strict:
                message = message.with_(correlation_id=message.id)  # counted when it came
        except Exception as error:  # noqa: BLE001 - whatever it is, others go on
            return bare(origin, topic), error
        return message, None


def bare(delivery: Delivery, topic: str) -> Message:
    """Return what can be kept of a *delivery* that cannot be read: a dead letter is a message.

    Its bytes are kept as they are, and those headers that are any.
    """
    try:
        return delivery.message
    except Exception:  # noqa: BLE001 - an adapter's mistake is no reason to lose it
        delivery.decoded = Message(
            id=delivery.coordinates_id(),
            topic=topic,
            payload=delivery.body,
            key=delivery.key,
            headers=_sound(delivery.headers),
            time=delivery.stored_at(),
        )
        return delivery.decoded


def _sound(pairs: Iterable[Any]) -> Headers:
    kept: list[Pair] = []
    for pair in pairs:
        with suppress(TypeError, ValueError):
            name, value = pair
            kept += Headers([(name, value)])
    return Headers.received(kept)
