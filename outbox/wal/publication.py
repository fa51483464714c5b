"""The publication: made when missing, checked before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql
from sqlalchemy.exc import DBAPIError

from holdfast.errors import ConfigurationError
from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine, RowMapping

    from holdfast.outbox.wal.slot import SlotNames

_PRIVILEGE = "42501"
_EXISTS = ("42710", "23505")  # made by another in the same moment
_ACTS = ("insert", "update", "delete", "truncate")


class Publication:
    """What of the tables' changes the slot tells; every fault names the command that mends it."""

    def __init__(self, engine: Engine, names: SlotNames) -> None:
        self.names = names
        self._engine = engine
        self._sql = statements("holdfast.outbox.wal", "postgresql")

    def prepare(self) -> bool:
        """Create the publication if it is missing; return whether it was there already.

        One that does not tell all that is wanted raises.
        """
        found = self._found()
        if found is None:
            self._create()
        else:
            self._check_acts(found)
        if self.names.required:
            self._check_tables()
        return found is not None

    def _found(self) -> RowMapping | None:
        name = {"name": self.names.publication}
        with self._engine.connect() as db:
            return db.execute(self._sql["publication"], name).mappings().first()

    def _check_acts(self, found: RowMapping) -> None:
        wanted = self.names.publish.split(", ")
        if missing := [act for act in wanted if not found[act]]:
            acts = ", ".join(act for act in _ACTS if found[act] or act in wanted)
            raise ConfigurationError(
                f"publication {self.names.publication} leaves "
                f"{' and '.join(f'{act}s' for act in missing)} out: run  ALTER PUBLICATION "
                f"{self.names.quoted} SET (publish = '{acts}')"
            )

    def _create(self) -> None:
        names = self.names
        name = sql.Identifier(names.publication)
        with self._engine.connect() as db:
            has = {t: db.execute(self._sql["table"], {"table": t}).first() for t in names.tables}
        there = [found for found in has.values() if found is not None]
        if len(there) < len(names.tables) and names.required:
            missing = ", ".join(table for table, found in has.items() if found is None)
            raise ConfigurationError(f"table {missing} does not exist: run  holdfast db upgrade")
        tables = sql.SQL(", ").join(sql.Identifier(*found) for found in there)
        clause = sql.SQL("FOR TABLE {} ").format(tables) if there else sql.SQL("")
        command = (
            sql.SQL(
                "CREATE PUBLICATION {} {}WITH (publish = {}, publish_via_partition_root = true)"
            )
            .format(name, clause, sql.Literal(names.publish))
            .as_string()
        )
        self._run("create the publication", command, *self._comments(names.remark))

    def _comments(self, remark: str | None) -> list[str]:
        if not self.names.remark:
            return []
        said = sql.SQL("COMMENT ON PUBLICATION {} IS {}")
        name = sql.Identifier(self.names.publication)
        return [said.format(name, sql.Literal(remark)).as_string()]

    def _run(self, what: str, *commands: str) -> None:
        """Run *commands*, unless another did so in the same moment."""
        try:
            with self._engine.begin() as db:
                for command in commands:
                    db.exec_driver_sql(command)
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state not in (_PRIVILEGE, *_EXISTS):
                raise
            if state == _PRIVILEGE:
                raise ConfigurationError(
                    f"this role may not {what}; run as the owner:  {commands[0]}"
                ) from error

    @property
    def marked(self) -> bool:
        """Whether the publication was made here and `unmark` was not called yet."""
        found = self._found()
        return found is not None and found["remark"] == self.names.remark != ""

    def unmark(self) -> None:
        """Take the remark from the publication."""
        if self.marked:
            self._run("change the publication's comment", *self._comments(None))

    def _check_tables(self) -> None:
        with self._engine.connect() as db:
            for table in self.names.tables:
                where = {"name": self.names.publication, "table": table}
                if not db.execute(self._sql["published"], where).scalar():
                    raise ConfigurationError(
                        f"publication {self.names.publication} lacks the table: run  ALTER "
                        f"PUBLICATION {self.names.quoted} ADD TABLE {table}"
                    )
