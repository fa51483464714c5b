"""The relay's HTTP endpoint: /healthz, /readyz and /metrics, read only."""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.outbox.metrics import CONTENT_TYPE
from holdfast.outbox.probe_server import Answer, ProbeServer
from holdfast.scrubbing import clean, scrubbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox.probes import Verdict

_PLAIN = "text/plain; charset=utf-8"
_MOST_TOLD = 1_000


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

    def answer(self, path: str) -> Answer:
        """Return status, content type and body for *path*."""
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            known = ", ".join(self._pages)
            return HTTPStatus.NOT_FOUND, _PLAIN, f"there is only {known}\n".encode()
        return page()


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


def _judged(verdict: Verdict) -> Answer:
    status = HTTPStatus.OK if verdict.good else HTTPStatus.SERVICE_UNAVAILABLE
    # Anybody may ask: what is told of a failure names no secret and no statement.
    return status, _PLAIN, f"{clean(scrubbed(verdict.why))[:_MOST_TOLD]}\n".encode()
