"""The captured tables: that they are there, and can be read and followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from holdfast.errors import ConfigurationError
from holdfast.outbox.outages import short
from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

_PRIVILEGE = "42501"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as the server knows it."""

    oid: int
    schema: str
    name: str
    quoted: str
    readable: bool
    role: str
    """Who we are there."""


class Tables:
    """The tables with the given *names*, written as in SQL; every fault names its remedy."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = names
        self._sql = statements("holdfast.outbox.cdc", "postgresql")

    def found(self) -> list[Table]:
        """Return the tables in the order of their names."""
        return [self._find(name) for name in self._names]

    def _find(self, name: str) -> Table:
        try:
            with self._engine.connect() as db:
                row = db.execute(self._sql["table"], {"table": name}).mappings().first()
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None) or ""
            if state == _PRIVILEGE:
                fix = "let its owner run  GRANT USAGE ON SCHEMA <the schema> TO <the role>"
                raise ConfigurationError(f"table {name}: {short(error)}; {fix}") from error
            if state.startswith("42"):
                raise ConfigurationError(f"table {name}: {short(error)}") from error
            raise
        if row is None:
            raise ConfigurationError(
                f"table {name} does not exist: name it as in SQL, e.g. public.customer or "
                'public."Customer"'
            )
        return Table(**row)

    def check(self) -> None:
        """Raise unless updates and deletes of every table can be told.

        To publish a table that cannot identify its rows would make the application's own
        updates and deletes fail.
        """
        for table in self.found():
            with self._engine.connect() as db:
                bare = db.execute(self._sql["unidentified"], {"oid": table.oid}).scalar()
            if bare is not None:
                raise ConfigurationError(
                    f"table {bare} has nothing to identify a row by, and PostgreSQL would refuse "
                    f"every UPDATE and DELETE of it: add a primary key, or run  ALTER TABLE {bare} "
                    "REPLICA IDENTITY FULL"
                )

    def readable(self) -> list[Table]:
        """Return the tables; raise unless all of them may be read."""
        tables = self.found()
        for table in tables:
            if not table.readable:
                raise ConfigurationError(
                    f"the role may not read {table.quoted}, which the snapshot does: let its owner "
                    f"run  GRANT SELECT ON {table.quoted} TO {table.role}"
                )
        return tables

    def key(self, oid: int) -> list[str]:
        """Return the columns of the table's key; none if it has no key, or is gone."""
        with self._engine.connect() as db:
            return list(db.execute(self._sql["key"], {"oid": oid}).scalars())
