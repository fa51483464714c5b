"""Redis, with every write on disk before its answer."""

from tests.servers.install import output_version, program
from tests.servers.processes import Command
from tests.servers.server import Server


class Redis(Server):
    """A Redis whose acknowledged writes survive ``kill()``."""

    name = "redis"

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://{self.address}/0"

    @property
    def version(self) -> str:
        """The server's own version."""
        return output_version(program("redis-server"))

    def command(self) -> Command:
        """Return the command of the server."""
        listen = ("--bind", self.host, "--port", str(self.port), "--dir", str(self.folder))
        durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
        return Command(argv=(str(program("redis-server")), *listen, *durable))

    def answers(self) -> bool:
        """Return whether PING gets PONG: not while the append-only file is being loaded."""
        with self.connect() as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64) == b"+PONG\r\n"
