"""Valkey, with every write on disk before its answer."""

from tests.servers.install import output_version, valkey_server
from tests.servers.processes import Command
from tests.servers.redis import Redis


class Valkey(Redis):
    """A Valkey whose acknowledged writes survive ``kill()``; clients speak Redis to it."""

    name = "valkey"

    @property
    def version(self) -> str:
        """The server's own version."""
        return output_version(valkey_server())

    def command(self) -> Command:
        """Return the command of the server."""
        return Command(argv=(str(valkey_server()), *super().command().argv[1:]))
