"""NATS with JetStream, its streams on disk."""

from tests.servers.install import nats_server, output_version
from tests.servers.processes import Command
from tests.servers.server import Server

_JETSTREAM_INFO = b"CONNECT {}\r\nSUB answer 1\r\nPUB $JS.API.INFO answer 0\r\n\r\n"


class Nats(Server):
    """A NATS server with JetStream, whose file-stored messages survive ``kill()``."""

    name = "nats"

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{self.address}"

    @property
    def version(self) -> str:
        """The server's own version."""
        return output_version(nats_server())

    def command(self) -> Command:
        """Return the command of the server."""
        listen = ("--addr", self.host, "--port", str(self.port))
        jetstream = ("--jetstream", "--store_dir", str(self.folder))
        return Command(argv=(str(nats_server()), *listen, *jetstream))

    def answers(self) -> bool:
        """Return whether JetStream, not only the core server, answers a request."""
        with self.connect() as connection, connection.makefile("rb") as lines:
            if not lines.readline().startswith(b"INFO "):
                return False
            connection.sendall(_JETSTREAM_INFO)
            return any(line.startswith(b"MSG answer ") for line in lines)
