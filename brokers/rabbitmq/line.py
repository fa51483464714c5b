"""A connection that is made again when it was lost."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff, Jitter
from holdfast.brokers.rabbitmq.link import Link
from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_PAUSES = Backoff(first=0.1, ceiling=5.0, jitter=Jitter.EQUAL)


class Line:
    """Gives out the living link, or makes a new one to the next host.

    After each failure the next attempt waits longer, whoever asks and however often.
    """

    def __init__(self, parameters: Sequence[Any], clock: Clock, pauses: Backoff = _PAUSES) -> None:
        self._hosts = itertools.cycle(parameters)
        self._clock = clock
        self._pauses = pauses
        self._link: Link | None = None
        self._failures = 0
        self._next = clock.monotonic()

    @property
    def living(self) -> Link | None:
        """The link, if there is one and it lives."""
        return self._link if self._link is not None and self._link.is_alive else None

    def link(self, within: float, woken: threading.Event | None = None) -> Link:
        """Return a living link, at the latest after waiting *within* seconds to try again.

        `BrokerDown` if it is too early for an attempt, or if the attempt failed.
        """
        if (link := self.living) is not None:
            return link
        self._drop()
        pause = self._next - self._clock.monotonic()
        if pause > 0:
            self._clock.wait(threading.Event() if woken is None else woken, min(pause, within))
            if self._clock.monotonic() < self._next:
                raise BrokerDown("RabbitMQ was lost; the next attempt to connect is not yet due")
        self._link = link = self._attempt()
        return link

    def _attempt(self) -> Link:
        parameters = next(self._hosts)
        try:
            link = Link(parameters, self._clock)
        except BrokerDown as error:
            self._failures += 1
            pause = self._pauses.delay(self._failures) or 0.0
            self._next = self._clock.monotonic() + pause
            _log.warning("%s; next attempt in %.1f s", error, pause)
            raise
        if self._failures:
            _log.info("connected to RabbitMQ at %s again", link.address)
        self._failures = 0
        return link

    def _drop(self) -> None:
        if self._link is not None:
            _log.warning("lost RabbitMQ at %s: %s", self._link.address, self._link.failure)
            self._link.close()
            self._link = None

    def close(self) -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close()
            self._link = None
