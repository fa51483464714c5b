"""The servers of one test run."""

import shutil
from pathlib import Path
from typing import TypeVar

from tests.servers.server import Server

S = TypeVar("S", bound=Server)


class Fleet:
    """Starts servers on demand, each kind at most once for sharing, and closes all of them.

    Logs of closed servers are kept in *logs* until the run is known to have passed.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.report: list[str] = []
        self._shared: dict[type[Server], Server] = {}

    def shared(self, kind: type[S]) -> S:
        """Return the run's one server of this *kind*, started now if it is the first use."""
        if kind not in self._shared:
            self._shared[kind] = self.open(kind)
        server = self._shared[kind]
        assert isinstance(server, kind)
        return server

    def open(self, kind: type[S]) -> S:
        """Start a server nobody else uses; the caller closes it with ``close``."""
        server = kind()
        try:
            server.start()
        except BaseException:
            self.close(server)
            raise
        self.report.append(_line(server))
        return server

    def close(self, server: Server) -> None:
        """Keep the log of *server* and remove all the rest of it."""
        server.keep_log(self.logs)
        server.close()

    def close_shared(self) -> None:
        """Close every shared server."""
        while self._shared:
            self.close(self._shared.popitem()[1])

    def forget_logs(self) -> None:
        """Remove the kept logs: the run passed."""
        shutil.rmtree(self.logs, ignore_errors=True)


def _line(server: Server) -> str:
    facts = f"{server.name:<9} {server.version:<9} port {server.port}"
    return f"{facts}  started in {server.start_seconds:.2f} s"
