"""Are the consumer's tables there? Asked once, before the first message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect

from holdfast import dlq, idempotency
from holdfast.consumer.schema import metadata
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection


class MissingTables(ConfigurationError):
    """The database lacks tables; no message was touched."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__(
            f"the database lacks {', '.join(tables)}: run  holdfast db upgrade  with the same "
            "--database, or call holdfast.consumer.create_tables(engine)"
        )
        self.tables = tuple(tables)


def require_tables(db: Connection) -> None:
    """Raise `MissingTables` unless every table that a consumer writes to is there."""
    there = set(inspect(db).get_table_names())
    wanted = {*metadata.tables, *idempotency.metadata.tables, *dlq.metadata.tables}
    if missing := sorted(wanted - there):
        raise MissingTables(missing)
