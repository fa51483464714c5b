"""Notices a member that has stopped polling."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.brokers.rabbitmq.link import Link
    from holdfast.clock import Clock

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_SHORTEST = 0.01


class Watch:
    """Closes the connection of a member that does not poll, so that others get its lanes.

    The connection answers heartbeats by itself; without this a member that hangs would hold
    its lanes for ever. It comes back with its next poll.
    """

    def __init__(
        self, link: Link, session: float, clock: Clock, polled: Callable[[], float]
    ) -> None:
        self._link = link
        self._session = session
        self._clock = clock
        self._polled = polled

    def look(self) -> None:
        """Look again when the session could be over; runs in the link's thread."""
        connection = self._link.connection
        silence = self._clock.monotonic() - self._polled()
        if silence < self._session:
            connection.ioloop.call_later(max(self._session - silence, _SHORTEST), self.look)
        elif connection.is_open:
            _log.warning("no poll for %.0f s: leaving the group, so that others go on", silence)
            self._link.say_goodbye()
