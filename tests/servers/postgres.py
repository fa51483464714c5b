"""PostgreSQL, ready for logical replication."""

import os
import signal
import subprocess

import psycopg

from tests.servers.install import output_version, program
from tests.servers.processes import Command
from tests.servers.server import Server

_SETTINGS = {
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_connections": "200",
    "max_replication_slots": "64",
    "max_wal_senders": "64",
}
_HURRIED = {"fsync": "off", "full_page_writes": "off"}
"""A commit is with the kernel before it returns, which outlives a server that is killed."""


class Postgres(Server):
    """A PostgreSQL server with the superuser ``postgres`` and no password."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "Fast": it does not wait for clients to leave.

    @property
    def url(self) -> str:
        """SQLAlchemy's address of the database ``postgres``."""
        return self._url("postgres")

    @property
    def dsn(self) -> str:
        """The address of the database ``postgres`` for libpq and psycopg."""
        return f"host={self.host} port={self.port} user=postgres dbname=postgres"

    @property
    def version(self) -> str:
        """The server's own version."""
        return output_version(program("postgres"))

    @property
    def user(self) -> str | None:
        """Root is refused by the server itself; the package brings the user ``postgres``."""
        program("postgres")
        return "postgres" if os.geteuid() == 0 else None

    def database(self, name: str) -> str:
        """Create the database *name*, empty even if it existed, and return its url."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)', f'CREATE DATABASE "{name}"')
        return self._url(name)

    def execute(self, *statements: str) -> None:
        """Run SQL *statements* in the database ``postgres``, one by one; raise if one fails."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def prepare(self) -> None:
        """Create the cluster; without fsync, since no one misses it if the machine crashes now."""
        cluster = ("-D", str(self.folder / "data"), "-A", "trust", "-U", "postgres", "-E", "UTF8")
        argv = (self._tool("initdb"), *cluster, "--no-locale", "--no-sync")
        self._processes.run(Command(argv=argv, user=self.user))

    def command(self) -> Command:
        """Return the command of the server."""
        listen = {"listen_addresses": self.host, "port": str(self.port)}
        chosen = listen | _SETTINGS | (_HURRIED if self.is_hurried else {})
        settings = [f"--{name}={value}" for name, value in chosen.items()]
        argv = (str(program("postgres")), "-D", str(self.folder / "data"), *settings)
        return Command(argv=argv, user=self.user)

    def answers(self) -> bool:
        """Return whether connections are accepted: not while it still recovers."""
        argv = [self._tool("pg_isready"), "-q", "-d", self.dsn]
        return subprocess.run(argv, check=False).returncode == 0

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@{self.address}/{database}"

    def _tool(self, name: str) -> str:
        return str(program("postgres").with_name(name))
