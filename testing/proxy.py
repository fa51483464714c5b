"""A TCP proxy that breaks connections on command, to put before any real server."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.testing.tunnel import Direction, Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

_BACKLOG = 128


class _Mode(Enum):
    FORWARD = "forward"
    CUT = "cut"
    BLACK_HOLE = "black hole"


@dataclass(slots=True)
class _Limit:
    """Bytes still to be forwarded one way, and what happens then."""

    direction: Direction
    left: int
    then: Callable[[], None]


class FaultProxy:
    """Forwards connections on loopback to a server, until told to misbehave.

    Each command has taken effect when its call returns, and lasts until `heal` or another
    command. One thread does all the work; `close` ends it and releases every socket.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        host: str = "127.0.0.1",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target = (socket.gethostbyname(target_host), target_port)
        self._clock = clock
        self.host = host
        self._listener = _bound(host, 0)
        self._listener.listen(_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self.bytes: dict[Direction, int] = {"to_server": 0, "to_client": 0}
        self.accepted = 0
        self._mode = _Mode.FORWARD
        self._delay = 0.0
        self._limit: _Limit | None = None
        self._tunnels: list[Tunnel] = []
        self._is_closing = False
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]
        self._orders = queue.SimpleQueue()
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where clients connect, as host:port."""
        return f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections are open through the proxy now."""
        return len(self._tunnels)

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._tell(self._cut)

    def black_hole(self) -> None:
        """Accept connections and forward nothing; what is sent meanwhile arrives after `heal`."""
        self._tell(self._swallow)

    def delay(self, seconds: float) -> None:
        """Forward everything *seconds* late, in order, in either direction."""
        if seconds < 0:
            raise ValueError(f"delay of {seconds} s: use 0 or more")
        self._tell(lambda: setattr(self, "_delay", seconds))

    def stop_after(
        self,
        n_bytes: int,
        direction: Direction,
        *,
        then: Literal["cut", "black_hole"] = "cut",
    ) -> None:
        """Forward *n_bytes* more in *direction*, over all connections, then fail as *then* says."""
        if n_bytes < 0:
            raise ValueError(f"stop_after({n_bytes}): use 0 or more bytes")
        if direction not in self.bytes:
            raise ValueError(f"direction {direction!r}: use one of {', '.join(self.bytes)}")
        fail = {"cut": self._cut, "black_hole": self._swallow}[then]
        self._tell(lambda: setattr(self, "_limit", _Limit(direction, n_bytes, fail)))

    def heal(self) -> None:
        """Forward again, without delay or limit, and accept connections on the same port."""
        self._tell(self._heal)

    def close(self) -> None:
        """Drop every connection, end the thread and release the port."""
        if self._thread.is_alive():
            self._tell(lambda: setattr(self, "_is_closing", True))
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what follows runs in the proxy's own thread -----------------------------------

    def _tell(self, order: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise RuntimeError(f"the proxy on port {self.port} is closed")
        done = threading.Event()
        self._orders.put((order, done))
        self._bell.send(b"!")
        while not done.wait(0.1):
            if not self._thread.is_alive():
                raise RuntimeError(f"the proxy on port {self.port} has stopped")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        finally:
            for tunnel in self._tunnels:
                tunnel.close(reset=True)
            self._tunnels.clear()
            for end in (self._listener, self._bell, self._ear):
                end.close()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for the next thing to do, and do it."""
        timeout = self._watch()
        ready: set[object] = {key.fileobj for key, _ in self._selector.select(timeout)}
        if self._ear in ready:
            self._obey()
        if self._listener in ready and self._mode is not _Mode.CUT:
            self._accept()
        for tunnel in list(self._tunnels):
            if self._mode is _Mode.FORWARD:  # serving the one before may have ended that
                self._serve(tunnel, ready)

    def _watch(self) -> float | None:
        """Register what the present state waits for; return the longest wait."""
        interest: dict[socket.socket, int] = {self._ear: selectors.EVENT_READ}
        if self._mode is not _Mode.CUT:
            interest[self._listener] = selectors.EVENT_READ
        due: list[float] = []
        now = self._clock.monotonic()
        if self._mode is _Mode.FORWARD:
            for tunnel in self._tunnels:
                due += tunnel.await_next(now, interest)
        registered = {key.fileobj: key.events for key in self._selector.get_map().values()}
        for end in registered.keys() - interest.keys():
            self._selector.unregister(end)
        for end, events in interest.items():
            if end not in registered:
                self._selector.register(end, events)
            elif registered[end] != events:
                self._selector.modify(end, events)
        return max(min(due) - now, 0.0) if due else None

    def _obey(self) -> None:
        self._ear.recv(4096)
        while not self._orders.empty():
            order, done = self._orders.get()
            order()
            done.set()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # gone before it was served
            return
        self.accepted += 1
        self._tunnels.append(Tunnel(client, self._target))

    def _serve(self, tunnel: Tunnel, ready: set[object]) -> None:
        """Move what can be moved in *tunnel*; a broken end breaks the other one."""
        try:
            if not tunnel.is_connected:
                if tunnel.is_asked and tunnel.server not in ready:
                    return
                tunnel.connect()
                return
            for direction, stream in tunnel.streams.items():
                if stream.source in ready and stream.wants_to_read:
                    stream.read(self._clock.monotonic() + self._delay)
                limit = self._limit if self._limit and self._limit.direction == direction else None
                sent = stream.write(self._clock.monotonic(), limit.left if limit else None)
                self.bytes[direction] += sent
                if limit is not None:
                    limit.left -= sent
                    if limit.left == 0:
                        self._limit = None
                        limit.then()
                        return
                stream.pass_on_the_end()
        except OSError:
            self._drop(tunnel, reset=True)
        else:
            if tunnel.is_over:
                self._drop(tunnel, reset=False)

    def _drop(self, tunnel: Tunnel, *, reset: bool) -> None:
        for end in (tunnel.client, tunnel.server):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        tunnel.close(reset=reset)
        self._tunnels.remove(tunnel)

    def _cut(self) -> None:
        self._mode = _Mode.CUT
        # A bound socket that does not listen refuses connections and keeps the port ours.
        held = _bound(self.host, self.port)
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = held
        for tunnel in list(self._tunnels):  # last: who is reset and comes back is refused
            self._drop(tunnel, reset=True)

    def _swallow(self) -> None:
        self._listen_again()
        self._mode = _Mode.BLACK_HOLE

    def _heal(self) -> None:
        self._listen_again()
        self._mode, self._delay, self._limit = _Mode.FORWARD, 0.0, None

    def _listen_again(self) -> None:
        if self._mode is _Mode.CUT:
            self._listener.listen(_BACKLOG)


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.setblocking(False)
    return listener
