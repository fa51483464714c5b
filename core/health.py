"""Health over HTTP: /healthz, /readyz and /metrics, read only.

The server is small and bounded in threads, connections, bytes and time. One thread reads and
writes all connections without waiting for any; a few others make the answers. A client that
sends or takes a byte now and then is cut off at its deadline, and when too many are connected
the one that has said nothing useful for longest makes room, so that no number of slow clients
keeps a probe from its answer.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError
from holdfast.scrubbing import clean, scrubbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("holdfast.outbox")

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""What Prometheus expects as the content type of its text format."""
MOST_CLIENTS: Final = 64
"""Connections at a time."""
SECONDS: Final = 10.0
"""From the connection of a client to the last byte of its answer."""
_MOST_REQUEST: Final = 8_192
_MOST_TOLD: Final = 1_000
_THREADS: Final = 2
"""For the probes, and as many for everything else, which may take longer."""
_TICK: Final = 0.25
_END: Final = b"\r\n\r\n"
_PLAIN: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe answers."""

    good: bool
    why: str


class Exposition(NamedTuple):
    """A page of metrics, and in which format it is."""

    content_type: str
    body: bytes


class Endpoint:
    """Serves probes and metrics from threads of its own; it never disturbs the work."""

    def __init__(
        self,
        address: str,
        *,
        alive: Callable[[], ProbeResult],
        ready: Callable[[], ProbeResult],
        metrics: Callable[[str], Exposition],
    ) -> None:
        self._pages: dict[str, Callable[[str], Answer]] = {
            "/healthz": lambda _accept: _judged(alive()),
            "/readyz": lambda _accept: _judged(ready()),
            "/metrics": lambda accept: (HTTPStatus.OK, *metrics(accept)),
        }
        self._sock = _listen(address)
        self._server = ProbeServer(
            self._sock, self.answer, quick=frozenset({"/healthz", "/readyz"})
        )

    @property
    def address(self) -> str:
        """Where it listens; of interest after asking for port 0."""
        host, port = self._sock.getsockname()[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.stop()

    def answer(self, path: str, accept: str = "") -> Answer:
        """Return status, content type and body for *path*, in a format of *accept* if possible."""
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            known = ", ".join(self._pages)
            return HTTPStatus.NOT_FOUND, _PLAIN, f"there is only {known}\n".encode()
        return page(accept)


@contextmanager
def serving(
    address: str | None,
    *,
    alive: Callable[[], ProbeResult],
    ready: Callable[[], ProbeResult],
    metrics: Callable[[str], Exposition],
) -> Iterator[str]:
    """Serve on *address* meanwhile; yield the URL for a log line, "" without an address."""
    if address is None:
        yield ""
        return
    endpoint = Endpoint(address, alive=alive, ready=ready, metrics=metrics)
    try:
        endpoint.start()
        yield f", http://{endpoint.address}"
    finally:
        endpoint.stop()


def _listen(address: str) -> socket.socket:
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {address} for HTTP: {error.strerror or error}"
        ) from error


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of *address*, e.g. 127.0.0.1:9464, [::1]:9464 or :9464."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigurationError(f"HTTP address {address!r}: write host:port, as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _judged(verdict: ProbeResult) -> Answer:
    status = HTTPStatus.OK if verdict.good else HTTPStatus.SERVICE_UNAVAILABLE
    # Anybody may ask: what is told of a failure names no secret and no statement.
    return status, _PLAIN, f"{clean(scrubbed(verdict.why))[:_MOST_TOLD]}\n".encode()


class _Client:
    """One connection."""

    __slots__ = ("began", "said", "sock", "written")

    def __init__(self, sock: socket.socket, began: float) -> None:
        self.sock = sock
        self.began = began
        self.said = bytearray()
        self.written: memoryview | None = None
        """What is left to be sent, once there is an answer."""


class _Question(NamedTuple):
    """What a client asks for."""

    client: _Client
    method: str
    path: str
    accept: str


def _accepted(headers: list[bytes]) -> str:
    """Return which formats the client takes, by the *headers* of its request."""
    pairs = (line.partition(b":") for line in headers)
    said = [value.strip() for name, _, value in pairs if name.strip().lower() == b"accept"]
    return b",".join(said).decode("ascii", "replace")


class ProbeServer:
    """Answers GET and HEAD on *sock*, which listens already, by what *answer* returns."""

    def __init__(
        self,
        sock: socket.socket,
        answer: Callable[[str, str], Answer],
        *,
        quick: frozenset[str],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._sock = sock
        self._answer = answer
        self._quick = quick
        self._clock = clock
        self._clients: dict[socket.socket, _Client] = {}
        self._answers: SimpleQueue[tuple[_Client, bytes]] = SimpleQueue()
        self._asked: dict[bool, SimpleQueue[_Question | None]]
        self._asked = {True: SimpleQueue(), False: SimpleQueue()}
        self._wake, self._woken = socket.socketpair()
        self._stopping = False
        self._threads = [threading.Thread(target=self._serve, name="holdfast-http", daemon=True)]
        self._threads += [
            threading.Thread(target=self._make, args=(quick,), name="holdfast-http", daemon=True)
            for quick in (True, False)
            for _ in range(_THREADS)
        ]

    def start(self) -> None:
        """Begin to answer."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._stopping = True
        self._ring()
        serving = self._threads[0]
        if serving.is_alive():
            serving.join(5.0)
        for asked in self._asked.values():
            for _ in range(_THREADS):
                asked.put(None)
        for sock in (self._sock, self._wake, self._woken):
            sock.close()

    def _ring(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _serve(self) -> None:
        for sock in (self._sock, self._woken):
            sock.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._sock, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._stopping:
                for key, _ in ready.select(_TICK):
                    if key.fileobj is self._sock:
                        self._accept(ready)
                    elif key.fileobj is self._woken:
                        with suppress(OSError):
                            self._woken.recv(4096)
                    elif (client := self._clients.get(key.data)) is not None:
                        self._move(ready, client)
                self._hand_out(ready)
                self._cut_off(ready)
            for client in list(self._clients.values()):
                self._close(ready, client)

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        if len(self._clients) >= MOST_CLIENTS:
            # Whoever has not even asked yet goes first, then the oldest.
            oldest = min(self._clients.values(), key=lambda one: (_END in one.said, one.began))
            self._close(ready, oldest)
        sock.setblocking(False)
        self._clients[sock] = _Client(sock, self._clock.monotonic())
        ready.register(sock, selectors.EVENT_READ, sock)

    def _move(self, ready: selectors.BaseSelector, client: _Client) -> None:
        """Read what *client* says, or write what it has not yet taken."""
        try:
            if client.written is not None:
                client.written = client.written[client.sock.send(client.written) :]
                if not client.written:
                    self._close(ready, client)
                return
            said = client.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self._close(ready, client)
            return
        if not said:
            self._close(ready, client)
            return
        client.said += said
        if _END in client.said or len(client.said) > _MOST_REQUEST:
            ready.unregister(client.sock)
            self._ask(client)

    def _ask(self, client: _Client) -> None:
        head, *headers = bytes(client.said[:_MOST_REQUEST]).partition(_END)[0].split(b"\r\n")
        words = head.split()
        is_whole = _END in client.said and len(words) == 3 and words[2].startswith(b"HTTP/1.")
        method, path = (words[0], words[1]) if is_whole else (b"", b"")
        page = path.decode("ascii", "replace")
        quick = page.partition("?")[0] in self._quick
        verb = method.decode("ascii", "replace")
        self._asked[quick].put(_Question(client, verb, page, _accepted(headers)))

    def _make(self, quick: bool) -> None:
        while (asked := self._asked[quick].get()) is not None:
            self._answers.put((asked.client, self._written(asked)))
            self._ring()

    def _written(self, asked: _Question) -> bytes:
        _, method, path, accept = asked
        if method in ("GET", "HEAD"):
            try:
                status, kind, body = self._answer(path, accept)
            except Exception as error:  # noqa: BLE001 - the next question may be answered
                log.error("http: %s cannot be answered: %s", path, type(error).__name__)  # noqa: TRY400
                status, kind, body = (
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    _PLAIN,
                    b"failed, see the log\n",
                )
        elif method:
            status, kind, body = HTTPStatus.NOT_IMPLEMENTED, _PLAIN, b"only GET and HEAD\n"
        else:
            status, kind, body = HTTPStatus.BAD_REQUEST, _PLAIN, b"no HTTP request\n"
        log.debug("http: %s %s %d", method, path, status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nServer: holdfast\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)

    def _hand_out(self, ready: selectors.BaseSelector) -> None:
        """Begin to send the answers that were made."""
        while not self._answers.empty():
            client, written = self._answers.get()
            if client.sock in self._clients:
                client.written = memoryview(written)
                ready.register(client.sock, selectors.EVENT_WRITE, client.sock)

    def _cut_off(self, ready: selectors.BaseSelector) -> None:
        now = self._clock.monotonic()
        for client in [one for one in self._clients.values() if now - one.began > SECONDS]:
            self._close(ready, client)

    def _close(self, ready: selectors.BaseSelector, client: _Client) -> None:
        self._clients.pop(client.sock, None)
        with suppress(KeyError, ValueError):
            ready.unregister(client.sock)
        client.sock.close()
