"""One server for all workers of a parallel run: the controller owns it, the workers borrow it."""

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tests.servers.server import Server, ServerFailed

S = TypeVar("S", bound=Server)
_START_SECONDS = 240.0  # two tries of the slowest server, on a busy machine


class Lender:
    """Answers, on a socket, where the run's one server of a kind is; it starts on first demand."""

    def __init__(
        self, kinds: Collection[type[Server]], shared: Callable[[type[Server]], Server]
    ) -> None:
        lender, by_name = self, {kind.name: kind for kind in kinds}

        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                """Serve one borrower."""
                name = self.rfile.readline().decode().strip()
                self.wfile.write(json.dumps(lender._facts(by_name[name])).encode() + b"\n")

        self._shared = shared
        # An abstract address needs no file, and is gone with this process.
        self.address = f"\0holdfast-lender-{os.getpid()}-{os.urandom(4).hex()}"
        self._listener = socketserver.ThreadingUnixStreamServer(self.address, Answer)
        self._listener.daemon_threads = True
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lend no more; the servers stay the owner's to close."""
        self._listener.shutdown()
        self._listener.server_close()

    def _facts(self, kind: type[Server]) -> dict[str, Any]:
        try:
            server = self._shared(kind)
        except ServerFailed as error:
            return {"error": str(error)}
        return {"port": server.port, "pid": server.pid, "folder": str(server.folder)}


def borrow(kind: type[S], address: str) -> S:
    """Return the run's server of this *kind*, as the lender at *address* started it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_START_SECONDS)
        connection.connect(address)
        connection.sendall(f"{kind.name}\n".encode())
        with connection.makefile() as answers:
            facts = json.loads(answers.readline())
    if "error" in facts:
        raise ServerFailed(facts["error"])
    return kind.borrowed(facts["port"], facts["pid"], Elsewhere(Path(facts["folder"])))


class Elsewhere:
    """Stands for the processes of a borrowed server, which are not the borrower's to touch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "server.log"

    def __getattr__(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what} hurts every test that shares the server: use private_server")
