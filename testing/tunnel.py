"""One proxied connection: two sockets, and the bytes on their way between them."""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Literal

Direction = Literal["to_server", "to_client"]

_CHUNK = 65_536
_MOST_QUEUED = 1 << 20
_RESET = struct.pack("ii", 1, 0)  # linger 0: closing sends RST, as a killed peer does
_UNFINISHED = {errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EALREADY}


class TunnelStream:
    """One direction of a tunnel; what was read waits here until it is due and writable."""

    __slots__ = ("_queue", "_queued", "ended", "shut", "source", "target")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued = 0
        self.ended = False
        self.shut = False

    @property
    def wants_to_read(self) -> bool:
        """Whether more may be read from the source."""
        return not self.ended and self._queued < _MOST_QUEUED

    def due(self) -> float | None:
        """Return when the next bytes may be written; None when there are none."""
        return self._queue[0][0] if self._queue else None

    def read(self, due: float) -> None:
        """Read what has arrived, to be written once *due*."""
        try:
            data = self.source.recv(_CHUNK)
        except BlockingIOError:
            return
        if data:
            self._queue.append((due, data))
            self._queued += len(data)
        else:
            self.ended = True

    def write(self, now: float, most: int | None) -> int:
        """Write what is due, at most *most* bytes; return how many bytes were taken."""
        total = 0
        while self._queue and self._queue[0][0] <= now and (most is None or total < most):
            due, data = self._queue.popleft()
            part = data if most is None else data[: most - total]
            try:
                sent = self.target.send(part)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._queue.appendleft((due, data[sent:]))
            total += sent
            if sent < len(part):
                break
        self._queued -= total
        return total

    def pass_on_the_end(self) -> None:
        """Close the target's half once the source has ended and all is written."""
        if self.ended and not self._queue and not self.shut:
            self.shut = True
            with suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)


class Tunnel:
    """A client's connection, and the one made for it to the server."""

    def __init__(self, client: socket.socket, address: tuple[str, int]) -> None:
        self.client = client
        self.server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for end in (self.client, self.server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = address
        self.is_asked = False
        self.is_connected = False
        self.streams: dict[Direction, TunnelStream] = {
            "to_server": TunnelStream(self.client, self.server),
            "to_client": TunnelStream(self.server, self.client),
        }

    def connect(self) -> None:
        """Begin or complete the connection to the server; OSError when it is refused."""
        if not self.is_asked:
            self.is_asked = True
            code = self.server.connect_ex(self._address)
        else:
            code = self.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code in _UNFINISHED:
            return
        if code:
            raise OSError(code, f"{self._address[0]}:{self._address[1]} refused the connection")
        self.is_connected = True

    def await_next(self, now: float, interest: dict[socket.socket, int]) -> list[float]:
        """Add the sockets to watch to *interest*, and return the moments to wait for."""
        if not self.is_asked:
            return [now]
        if not self.is_connected:
            interest[self.server] = EVENT_WRITE
            return []
        moments: list[float] = []
        for stream in self.streams.values():
            if stream.wants_to_read:
                interest[stream.source] = interest.get(stream.source, 0) | EVENT_READ
            due = stream.due()
            if due is not None and due <= now:
                interest[stream.target] = interest.get(stream.target, 0) | EVENT_WRITE
            elif due is not None:
                moments.append(due)
        return moments

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return all(stream.shut for stream in self.streams.values())

    def close(self, *, reset: bool) -> None:
        """Release both sockets; *reset* makes either peer see a broken connection."""
        for end in (self.client, self.server):
            if reset:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()
