"""The events in hand: sent, counted when they are stored, sent again after an outage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, Remedy, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.message import Message
    from holdfast.outbox.wal.courier import Courier
    from holdfast.ports import Published

log = logging.getLogger("holdfast.outbox.cdc")


class Shipment:
    """Holds at most one batch; what an outage hit is kept, in its order, and sent again first."""

    def __init__(self, courier: Courier) -> None:
        self.finished = 0
        """How many events of this stream are stored."""
        self._courier = courier
        self._messages: list[Message] = []
        self._outage: HoldfastError | None = None

    @property
    def under_way(self) -> bool:
        """Whether a batch is on its way or not yet collected, be it of a life before."""
        return self._courier.busy

    @property
    def unsettled(self) -> bool:
        """Whether events are in hand, under way or to be sent again."""
        return bool(self._messages)

    def send(self, messages: list[Message] | None = None) -> None:
        """Send *messages*, or again what is left; only when nothing is under way."""
        if messages is not None:
            self._messages = messages
        if self._messages:
            self._courier.send(self._messages)

    def collect(self) -> int:
        """Settle what came back; return how many events are stored."""
        if not self._courier.back:
            return 0
        try:
            results = self._courier.collect()
        except (DependencyDown, Transient) as error:
            self._outage = error
            return 0
        done = _prefix(self._messages, results)
        self.finished += done
        self._messages = self._messages[done:]
        if self._messages:
            self._outage = results[done].error
        return done

    def take_outage(self) -> HoldfastError | None:
        """Return why events have to be sent again, once."""
        outage, self._outage = self._outage, None
        return outage

    @property
    def is_hit(self) -> bool:
        """Whether an outage is to be told."""
        return self._outage is not None

    def let_go(self) -> None:
        """Forget the events: their stream is gone, and tells them again."""
        self._messages, self._outage, self.finished = [], None, 0

    def drop(self) -> None:
        """Take back what a stream before had sent, if it is back."""
        if self._courier.back:
            try:
                self._courier.collect()
            except HoldfastError as error:
                log.debug("given up: %s", error)

    def close(self) -> None:
        """Return once nothing is under way."""
        self._courier.close()


def _prefix(messages: Sequence[Message], results: Sequence[Published]) -> int:
    """Return how many from the start were stored; raise what the broker refuses for good."""
    for number, (message, result) in enumerate(zip(messages, results, strict=True)):
        if result.error is not None:
            if result.error.remedy in (Remedy.FIX, Remedy.DEAD_LETTER):
                raise ConfigurationError(
                    f"the change of {message.topic} with key {message.key_text} is refused: "
                    f"{result.error}"
                ) from result.error
            return number
    return len(messages)
