"""A PostgreSQL server as it comes out of the box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.servers import Postgres

if TYPE_CHECKING:
    from tests.servers.processes import Command


class PlainPostgres(Postgres):
    """A server as it comes out of the box."""

    name = "plain-postgres"

    def command(self) -> Command:
        """Return the command without logical replication."""
        command = super().command()
        argv = (a.replace("wal_level=logical", "wal_level=replica") for a in command.argv)
        return type(command)(argv=tuple(argv), user=command.user)
