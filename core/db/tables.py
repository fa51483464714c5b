"""Are the tables there? Asked once, before the first work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import MetaData
    from sqlalchemy.engine import Connection


class MissingTables(ConfigurationError):
    """The database lacks tables; nothing was read or written, and no message was touched."""

    def __init__(self, tables: Sequence[str], otherwise: str = "") -> None:
        super().__init__(
            f"the database lacks {', '.join(tables)}: run  holdfast db upgrade  with the same "
            f"--database{otherwise}"
        )
        self.tables = tuple(tables)


def missing_tables(db: Connection, *wanted: MetaData) -> list[str]:
    """Return the names of the tables of *wanted* that *db* lacks.

    They are listed in one query; one that is not there is looked for along the search path.
    """
    inspector = inspect(db)
    names = {name for metadata in wanted for name in metadata.tables}
    unseen = sorted(names.difference(inspector.get_table_names()))
    return [name for name in unseen if not inspector.has_table(name)]


def require_tables(db: Connection, *wanted: MetaData, otherwise: str = "") -> None:
    """Raise `MissingTables` unless all tables of *wanted* are there.

    *otherwise* tells what can be done instead of the migrations.
    """
    if missing := missing_tables(db, *wanted):
        raise MissingTables(missing, otherwise)
