"""The relay's HTTP endpoint: /healthz, /readyz and /metrics, read only."""

from __future__ import annotations

import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.outbox.metrics import CONTENT_TYPE
from holdfast.scrubbing import clean, scrubbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.probes import Verdict

log = logging.getLogger("holdfast.outbox")

_PLAIN = "text/plain; charset=utf-8"
_SLOW_SECONDS = 5.0
_MOST_TOLD = 1_000

Answer = tuple[HTTPStatus, str, bytes]


class Endpoint:
    """Serves probes and metrics from threads of its own; it never disturbs the relay."""

    def __init__(
        self,
        address: str,
        *,
        alive: Callable[[], Verdict],
        ready: Callable[[], Verdict],
        metrics: Callable[[], bytes],
    ) -> None:
        self._pages: dict[str, Callable[[], Answer]] = {
            "/healthz": lambda: _judged(alive()),
            "/readyz": lambda: _judged(ready()),
            "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, metrics()),
        }
        self._server = self._listen(address)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="holdfast-http", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it listens; of interest after asking for port 0."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> Answer:
        """Return status, content type and body for *path*."""
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            known = ", ".join(self._pages)
            return HTTPStatus.NOT_FOUND, _PLAIN, f"there is only {known}\n".encode()
        return page()

    def _listen(self, address: str) -> ThreadingHTTPServer:
        host, port = host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family})
        try:
            made: ThreadingHTTPServer = server((host, port), _handler(self))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {address} for HTTP: {error.strerror or error}"
            ) from error
        return made


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of *address*, e.g. 127.0.0.1:9464, [::1]:9464 or :9464."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigurationError(f"HTTP address {address!r}: write host:port, as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _judged(verdict: Verdict) -> Answer:
    status = HTTPStatus.OK if verdict.good else HTTPStatus.SERVICE_UNAVAILABLE
    # Anybody may ask: what is told of a failure names no secret and no statement.
    return status, _PLAIN, f"{clean(scrubbed(verdict.why))[:_MOST_TOLD]}\n".encode()


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SLOW_SECONDS  # a client that does not speak is not waited for
        server_version, sys_version = "holdfast", ""

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def _reply(self, *, with_body: bool) -> None:
            status, kind, body = endpoint.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            log.debug("http: " + format, *args)

    return Handler
