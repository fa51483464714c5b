"""The captured tables: that they can be read and followed, and the types of their columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from holdfast.db.errors import short
from holdfast.db.sql import statements
from holdfast.errors import ConfigurationError
from holdfast.outbox.cdc.envelope import array, scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


_DOMAIN = "d"
_UNSET = -1


class Kinds:
    """Finds how to read a type, by the catalog where its number alone does not tell.

    The stream names the type of a column as it was declared and a query that of the values,
    so a domain must be looked through: its key would differ between the two.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sql = statements("holdfast.outbox.cdc", "postgresql")["kind"]
        self._known: dict[tuple[int, int], Callable[[str], Any]] = {}

    def converter(self, kind: int, modifier: int) -> Callable[[str], Any]:
        """Return what turns the text of a column of type *kind* (its oid) into a JSON value."""
        known = self._known.get((kind, modifier))
        if known is None:
            known = scalar(kind, modifier) or self._found(kind, modifier)
            self._known[kind, modifier] = known
        return known

    def _found(self, kind: int, modifier: int) -> Callable[[str], Any]:
        with self._engine.connect() as db:
            found = db.execute(self._sql, {"oid": kind}).first()
        if found is None:  # dropped since
            return str
        if found.typtype == _DOMAIN:
            own = modifier if found.typtypmod == _UNSET else found.typtypmod
            return self.converter(found.base, own)
        return array(self.converter(found.element, modifier)) if found.element else str
