"""Waiting for news from the server and for calls of other threads at once."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.brokers.redis.connection import log
from holdfast.errors import BrokerDown, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.brokers.redis.connection import RedisConnection
    from holdfast.clock import Clock

_BLOCK = 5.0
_GRACE = 5.0


class StreamWaiter:
    """Waits until a stream has something new, `ring` is called, or time is up.

    The server is asked on a connection of its own by a blocking XREAD, which changes nothing
    there. The question stays open over several waits for the same streams; where they
    change, it is withdrawn over the *other* connection.
    """

    def __init__(self, link: RedisConnection, other: RedisConnection, clock: Clock) -> None:
        self._link = link
        self._other = other
        self._clock = clock
        self._inner, self._outer = socket.socketpair()
        self._inner.setblocking(False)
        self._outer.setblocking(False)
        self._asked: Mapping[str, str] | None = None
        self._answer_by = 0.0
        self._connected = 0
        self._id = 0

    def ring(self) -> None:
        """End a wait, or the next one if there is none now. Any thread may call this."""
        with suppress(OSError):  # full is as good, closed is too late
            self._outer.send(b"\0")

    def wait(self, streams: Mapping[str, str], seconds: float) -> bool:
        """Return whether `ring` ended the wait; *streams* are given with the last id known."""
        if not self._is_asked(streams):
            self._withdraw()
            self._ask(streams)
        with selectors.DefaultSelector() as both:
            both.register(self._inner, selectors.EVENT_READ)
            both.register(self._link.socket, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in both.select(seconds)}
        if self._link.socket in ready:
            self._hear()
        elif self._clock.monotonic() > self._answer_by:
            log.warning("%s left a question unanswered, connecting anew", self._link.name)
            self._asked = None
            self._link.disconnect()
        return self._inner in ready and self._was_rung()

    def rest(self, seconds: float) -> bool:
        """Wait for `ring` alone, while the server cannot be asked."""
        with selectors.DefaultSelector() as one:
            one.register(self._inner, selectors.EVENT_READ)
            return bool(one.select(seconds)) and self._was_rung()

    def close(self) -> None:
        """Release the connection and the sockets."""
        self._link.disconnect()
        self._inner.close()
        self._outer.close()

    def _is_asked(self, streams: Mapping[str, str]) -> bool:
        # More may have been asked for, as when lanes are paused: one early answer at most.
        asked = self._asked
        return asked is not None and all(asked.get(s) == last for s, last in streams.items())

    def _ask(self, streams: Mapping[str, str]) -> None:
        self._link.connect()
        if self._connected != self._link.connected:
            self._id = int(self._link.call("CLIENT", "ID"))
            self._connected = self._link.connected
        block = round(_BLOCK * 1000)
        self._link.send(
            [("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *streams, *streams.values())]
        )
        self._asked = dict(streams)
        self._answer_by = self._clock.monotonic() + _BLOCK + _GRACE

    def _hear(self) -> None:
        """Read the answer; a connection that fails now is made anew with the next question."""
        self._asked = None
        with suppress(BrokerDown):
            self._link.answers(1)

    def _withdraw(self) -> None:
        """Have an open question answered now: the streams have changed."""
        if self._asked is None:
            return
        try:
            self._other.call("CLIENT", "UNBLOCK", self._id)
        except ConfigurationError:  # not allowed to
            self._asked = None
            self._link.disconnect()
        else:
            self._hear()

    def _was_rung(self) -> bool:
        with suppress(BlockingIOError):
            while self._inner.recv(4096):
                pass
        return True
