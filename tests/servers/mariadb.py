"""MariaDB with InnoDB."""

import os
import subprocess
from contextlib import closing

import pymysql

from tests.servers.install import output_version, program
from tests.servers.processes import Command
from tests.servers.server import Server

# A commit is with the kernel before it returns, which outlives a server that is killed.
_HURRIED = ("--innodb-flush-log-at-trx-commit=2", "--skip-innodb-doublewrite")


class MariaDB(Server):
    """A MariaDB server with the superuser ``root`` and no password."""

    name = "mariadb"

    @property
    def url(self) -> str:
        """SQLAlchemy's address of the database ``test``."""
        return self._url("test")

    @property
    def version(self) -> str:
        """The server's own version."""
        return output_version(program("mariadbd"))

    def database(self, name: str) -> str:
        """Create the database *name*, empty even if it existed, and return its url."""
        self.execute(f"CREATE OR REPLACE DATABASE `{name}`")
        return self._url(name)

    def execute(self, statement: str) -> None:
        """Run one SQL *statement*; raise when it fails."""
        login = pymysql.connect(host=self.host, port=self.port, user="root", autocommit=True)
        with closing(login) as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def prepare(self) -> None:
        """Create the system tables."""
        root = ("--auth-root-authentication-method=normal", "--skip-name-resolve")
        argv = (str(program("mariadb-install-db")), *self._data(), *root)
        self._processes.run(Command(argv=argv))

    def command(self) -> Command:
        """Return the command of the server."""
        listen = (f"--bind-address={self.host}", f"--port={self.port}", "--skip-name-resolve")
        files = (f"--socket={self.folder / 'socket'}", f"--pid-file={self.folder / 'pid'}")
        # Without its packaged defaults the server would fall back to latin1.
        text = ("--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci")
        argv = (str(program("mariadbd")), *self._data(), *listen, *files, *text)
        return Command(
            argv=(*argv, "--max-connections=200", *(_HURRIED if self.is_hurried else ()))
        )

    def answers(self) -> bool:
        """Return whether a client can log in and ping."""
        argv = [*self._client("mariadb-admin"), "ping"]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def _data(self) -> tuple[str, ...]:
        # As root it wants to be told so.
        user = ("--user=root",) if os.geteuid() == 0 else ()
        return ("--no-defaults", f"--datadir={self.folder / 'data'}", *user)

    def _client(self, name: str) -> list[str]:
        address = [f"--host={self.host}", f"--port={self.port}", "--protocol=tcp", "--user=root"]
        return [str(program(name)), "--no-defaults", *address]

    def _url(self, database: str) -> str:
        return f"mysql+pymysql://root@{self.address}/{database}"
