"""The proxy forwards faithfully, fails on command and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.clock import SYSTEM_CLOCK
from holdfast.testing import FaultProxy, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            self._ends.append(end)
            self._threads.append(threading.Thread(target=self._serve, args=(end,)))
            self._threads[-1].start()

    def _serve(self, end: socket.socket) -> None:
        try:
            while data := end.recv(65536):
                self.got += data
                end.sendall(data)
            end.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        with suppress(OSError):  # closed by the test already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(60)  # what it accepts last is closed as well
        for end in self._ends:
            end.close()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connected(proxy) as client:
        yield client


def connected(proxy: FaultProxy) -> socket.socket:
    client = socket.create_connection((proxy.host, proxy.port), timeout=60)
    client.settimeout(60)
    return client


def received(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := client.recv(count - len(data))):
        data += part
    return data


def is_broken(client: socket.socket) -> bool:
    """Send and receive a little; whether the connection has failed."""
    client.settimeout(0.01)
    try:
        client.sendall(b"x" * 10_000)
        client.recv(65536)
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def open_descriptors() -> int:
    listing = Path("/proc/self/fd")
    return len(list(listing.iterdir())) if listing.exists() else 0


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.1)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(60)
    return False


def test_it_forwards_in_both_directions_and_counts(
    proxy: FaultProxy, client: socket.socket
) -> None:
    """Every byte arrives, in order, and is counted."""
    data = os.urandom(300_000)
    thread = threading.Thread(target=client.sendall, args=(data,))
    thread.start()
    assert received(client, len(data)) == data
    thread.join(60)
    expected = {"to_server": len(data), "to_client": len(data)}
    wait_until(lambda: proxy.bytes == expected, what="all bytes are counted")
    assert (proxy.connections, proxy.accepted) == (1, 1)


def test_the_end_of_a_stream_is_passed_on(proxy: FaultProxy, client: socket.socket) -> None:
    """Half-closing reaches the server, whose answer still arrives."""
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert received(client, 100) == b"last words"
    wait_until(lambda: proxy.connections == 0, what="the connection is released")


def test_a_cut_resets_connections_and_refuses_new_ones(
    proxy: FaultProxy, client: socket.socket
) -> None:
    """Clients see a broken connection now, and a closed port after."""
    client.sendall(b"a")
    assert received(client, 1) == b"a"
    proxy.cut()
    assert proxy.connections == 0
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)


def test_a_healed_cut_accepts_on_the_same_port(proxy: FaultProxy) -> None:
    """Clients that reconnect need no new address."""
    for _ in range(3):
        proxy.cut()
        proxy.heal()
        with connected(proxy) as client:
            client.sendall(b"a")
            assert received(client, 1) == b"a"


def test_a_black_hole_accepts_and_answers_nothing(proxy: FaultProxy, echo: Echo) -> None:
    """Old and new connections stay open and silent, and the server gets nothing."""
    with connected(proxy) as old:
        old.sendall(b"a")
        assert received(old, 1) == b"a"
        proxy.black_hole()
        with connected(proxy) as new:
            old.sendall(b"old")
            new.sendall(b"new")
            assert is_silent(old)
            assert is_silent(new)
            assert bytes(echo.got) == b"a"
            proxy.heal()
            assert received(old, 3) == b"old"
            assert received(new, 3) == b"new"


def test_a_black_hole_after_a_cut_accepts_again(proxy: FaultProxy) -> None:
    """The modes replace one another."""
    proxy.cut()
    proxy.black_hole()
    with connected(proxy) as client:
        client.sendall(b"a")
        assert is_silent(client)


def test_a_delay_holds_everything_back_and_keeps_the_order(
    proxy: FaultProxy, client: socket.socket
) -> None:
    """Each way takes at least the delay."""
    proxy.delay(0.1)
    started = SYSTEM_CLOCK.monotonic()
    client.sendall(b"a")
    client.sendall(b"b")
    assert received(client, 2) == b"ab"
    assert SYSTEM_CLOCK.monotonic() - started >= 0.2
    proxy.heal()
    client.sendall(b"c")
    assert received(client, 1) == b"c"


@pytest.mark.parametrize("n_bytes", [0, 1, 70_000])
def test_it_stops_after_exactly_so_many_bytes_to_the_server(
    proxy: FaultProxy, client: socket.socket, echo: Echo, n_bytes: int
) -> None:
    """The server gets the first part of a request, and the client a broken connection."""
    proxy.stop_after(n_bytes, "to_server")
    wait_until(lambda: is_broken(client), what="the client notices")
    assert proxy.bytes["to_server"] == n_bytes
    wait_until(lambda: len(echo.got) == n_bytes, what="the server has its part")
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)


def test_an_answer_can_be_lost_in_a_black_hole(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    """The server has done the work, and the client never hears of it."""
    proxy.stop_after(2, "to_client", then="black_hole")
    client.sendall(b"abcd")
    assert received(client, 2) == b"ab"
    assert is_silent(client)
    assert bytes(echo.got) == b"abcd"
    proxy.heal()
    assert received(client, 2) == b"cd"


def test_a_server_that_is_down_looks_down(proxy: FaultProxy, echo: Echo) -> None:
    """The client is reset, at the latest when it reads."""
    echo.close()
    with pytest.raises(ConnectionResetError), connected(proxy) as client:
        client.recv(1)
    wait_until(lambda: proxy.connections == 0, what="the connection is released")


def test_closing_ends_the_thread_and_frees_the_port(echo: Echo) -> None:
    """Nothing is left behind, with connections open or not; closing twice is harmless."""
    before = threading.active_count()
    descriptors = open_descriptors()
    proxy = FaultProxy("127.0.0.1", echo.port)
    client = connected(proxy)
    client.sendall(b"a")
    assert received(client, 1) == b"a"
    proxy.close()
    proxy.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
    wait_until(lambda: threading.active_count() <= before + 1, what="threads are gone")
    assert open_descriptors() <= descriptors + 1  # the echo server's end may linger
    with pytest.raises(RuntimeError, match="closed"):
        proxy.cut()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda proxy: proxy.delay(-1), "0 or more"),
        (lambda proxy: proxy.stop_after(-1, "to_server"), "0 or more"),
        (lambda proxy: proxy.stop_after(1, "up"), "to_server, to_client"),
    ],
)
def test_nonsense_is_refused(proxy: FaultProxy, call: object, said: str) -> None:
    """The message names the fix."""
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call(proxy)


def test_many_connections_at_once(proxy: FaultProxy) -> None:
    """Connections do not disturb one another."""
    clients = [connected(proxy) for _ in range(30)]
    for number, client in enumerate(clients):
        client.sendall(b"%02d" % number)
    assert [received(client, 2) for client in clients] == [b"%02d" % n for n in range(30)]
    for client in clients:
        client.close()
    wait_until(lambda: proxy.connections == 0, what="all are released")
