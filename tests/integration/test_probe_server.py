"""Probes are answered whatever other clients do: threads, connections and time are bounded."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from holdfast.health import MOST_CLIENTS, SECONDS, Endpoint, Exposition, ProbeResult, ProbeServer
from holdfast.testing import VirtualClock, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def serving(metrics: Callable[[], bytes] = lambda: b"up 1\n") -> Iterator[tuple[str, int]]:
    """Serve, and yield where."""
    page = Endpoint(
        "127.0.0.1:0", alive=lambda: ProbeResult(True, "stepping"),
        metrics=lambda accept: Exposition(accept or "text/plain", metrics()),
        ready=lambda: ProbeResult(False, "starting"),
    )  # fmt: skip
    page.start()
    host, _, port = page.address.rpartition(":")
    try:
        yield host, int(port)
    finally:
        page.stop()


def asked(
    where: tuple[str, int], path: str, method: str = "GET", accept: str = "*/*"
) -> tuple[int, bytes]:
    """Return status and body of a page."""
    connection = http.client.HTTPConnection(*where, timeout=30)
    connection.request(method, path, headers={"Accept": accept})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_metrics_are_told_in_a_format_that_is_asked_for() -> None:
    """However the header is spelled, and however many times it comes."""

    def told(accept: str) -> Exposition:
        return Exposition("text/x-told", accept.encode())

    page = Endpoint("127.0.0.1:0", alive=lambda: ProbeResult(True, ""), metrics=told,
                    ready=lambda: ProbeResult(True, ""))  # fmt: skip
    page.start()
    try:
        host, _, port = page.address.rpartition(":")
        where = host, int(port)
        assert asked(where, "/metrics", accept="text/plain;q=0.5") == (200, b"text/plain;q=0.5")
        with socket.create_connection(where) as one:
            one.settimeout(30)
            one.sendall(b"GET /metrics HTTP/1.1\r\nACCEPT:a/b\r\nHost: x\r\naccept: c/d\r\n\r\n")
            got = b""
            while part := one.recv(4096):
                got += part
        assert b"Content-Type: text/x-told\r\n" in got
        assert got.endswith(b"\r\n\r\na/b,c/d")
        assert asked(where, "/metrics", "HEAD") == (200, b"")
    finally:
        page.stop()


def test_pages_are_served_as_before() -> None:
    """Probes with their status, metrics, and a word about everything else."""
    with serving() as where:
        assert asked(where, "/healthz") == (200, b"stepping\n")
        assert asked(where, "/readyz?verbose") == (503, b"starting\n")
        assert asked(where, "/metrics") == (200, b"up 1\n")
        assert asked(where, "/metrics", "HEAD") == (200, b"")
        assert asked(where, "/other")[0] == 404
        assert asked(where, "/healthz", "POST")[0] == 501


def test_many_slow_clients_cost_no_thread_and_keep_no_probe_waiting() -> None:
    """A byte now and then keeps nothing but a place, which the next one may take."""
    idle = threading.active_count()
    with serving() as where, ExitStack() as open_ones:
        asked(where, "/healthz")
        before = threading.active_count()
        slow = [open_ones.enter_context(socket.create_connection(where)) for _ in range(300)]
        for number, one in enumerate(slow):
            try:
                one.sendall(b"GET /healthz HTTP/1.1\r\nX: " if number % 2 else b"G")
            except OSError:
                continue  # its place was taken
        for _ in range(20):
            assert asked(where, "/healthz") == (200, b"stepping\n")
        assert threading.active_count() <= before <= idle + 6


def test_a_page_that_hangs_keeps_no_probe_waiting() -> None:
    """Metrics that are asked for by many, and never come, take only their own threads."""
    hanging, idle = threading.Event(), threading.active_count()
    with serving(lambda: str(hanging.wait(60)).encode()) as where, ExitStack() as open_ones:
        for _ in range(MOST_CLIENTS - 4):
            one = open_ones.enter_context(socket.create_connection(where))
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert asked(where, "/healthz") == (200, b"stepping\n")
        assert threading.active_count() <= idle + 6
        hanging.set()


def test_a_client_that_never_ends_is_cut_off_at_its_deadline() -> None:
    """Neither one that dribbles its request, nor one that does not take its answer."""
    clock = VirtualClock()
    listening = socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    large = b"x" * 50_000_000
    server = ProbeServer(
        listening, lambda *_: (HTTPStatus.OK, "text/plain", large), quick=frozenset(), clock=clock
    )
    server.start()
    with socket.create_connection(where) as dribbling, socket.create_connection(where) as deaf:
        dribbling.sendall(b"G")
        deaf.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: len(server._clients) == 2, deadline=90, what="both are connected")
        wait_until(lambda: any(one.written for one in server._clients.values()), deadline=90,
                   what="the answer is under way")  # fmt: skip
        clock.advance(SECONDS + 1)
        wait_until(lambda: not server._clients, deadline=90, what="both are cut off")
        dribbling.settimeout(30)
        assert dribbling.recv(1) == b""
    server.stop()


@pytest.mark.parametrize(
    "said", [b"x" * 20_000, b"\r\n\r\n", b"GET /healthz\r\n\r\n", b"\xff\r\n\r\n"]
)
def test_what_is_no_request_is_told_so(said: bytes) -> None:
    """And the server goes on."""
    with serving() as where:
        with socket.create_connection(where) as one:
            one.settimeout(30)
            one.sendall(said)
            got = b""
            try:
                while part := one.recv(4096):
                    got += part
            except ConnectionResetError:  # it was not read to its end
                pass
            assert got == b"" or b"400" in got
        assert asked(where, "/healthz")[0] == 200


def test_the_port_is_free_after_the_stop() -> None:
    """Another may listen there at once."""
    with serving() as where:
        pass
    socket.create_server(where).close()
