"""Are the outbox tables there? Asked once, before the first work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect

from holdfast.errors import ConfigurationError
from holdfast.outbox.schema import metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection


class MissingTables(ConfigurationError):
    """The database lacks outbox tables; nothing was read or written."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__(
            f"the database lacks {', '.join(tables)}: run  holdfast db upgrade  with the same "
            "--database (or include holdfast.outbox.metadata in your own migrations)"
        )
        self.tables = tuple(tables)


def missing_tables(db: Connection) -> list[str]:
    """Return the names of the outbox tables that *db* lacks."""
    inspector = inspect(db)
    return [name for name in sorted(metadata.tables) if not inspector.has_table(name)]


def require_tables(db: Connection) -> None:
    """Raise `MissingTables` unless all outbox tables are there."""
    if missing := missing_tables(db):
        raise MissingTables(missing)
