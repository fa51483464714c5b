"""The servers of one test run."""

import shutil
import threading
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from tests.servers.lending import borrow
from tests.servers.server import Server, ServerFailed

S = TypeVar("S", bound=Server)


class Fleet:
    """Starts servers on demand, each kind at most once for sharing, and closes all of them.

    Logs of closed servers are kept in *logs* until the run is known to have passed. In a
    parallel run the *lent* kinds, which are slow to start, are borrowed from the *lender*.
    """

    def __init__(
        self, logs: Path, lender: str | None = None, lent: Collection[type[Server]] = ()
    ) -> None:
        self.logs = logs
        self.report: list[str] = []
        self._lender = lender
        self._lent = () if lender is None else lent
        self._shared: dict[type[Server], Server] = {}
        self._starting: defaultdict[type[Server], threading.Lock] = defaultdict(threading.Lock)

    def shared(self, kind: type[S]) -> S:
        """Return the run's one server of this *kind*, started now if it is the first use."""
        with self._starting[kind]:
            if kind not in self._shared:
                self._shared[kind] = self._first(kind)
        server = self._shared[kind]
        assert isinstance(server, kind)
        return server

    def _first(self, kind: type[S]) -> S:
        return borrow(kind, str(self._lender)) if kind in self._lent else self.open(kind)

    def open(self, kind: type[S]) -> S:
        """Start a server nobody else uses; the caller closes it with ``close``.

        A first start that fails is tried once more, from nothing and on another port.
        """
        try:
            return self._opened(kind)
        except ServerFailed as error:
            why = str(error).partition("\n")[0]
            self.report.append(f"{kind.name:<9} did not start at first: {why}")
            return self._opened(kind)

    def _opened(self, kind: type[S]) -> S:
        server = kind()
        server.is_hurried = True  # tests kill servers, not the machine
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
        """Close every shared server of our own."""
        while self._shared:
            kind, server = self._shared.popitem()
            if kind not in self._lent:
                self.close(server)

    def forget_logs(self) -> None:
        """Remove the kept logs: the run passed."""
        shutil.rmtree(self.logs, ignore_errors=True)


def _line(server: Server) -> str:
    facts = f"{server.name:<9} {server.version:<9} port {server.port}"
    return f"{facts}  started in {server.start_seconds:.2f} s"
