"""The inbox table: which messages a handler has already worked off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, DateTime, MetaData, String, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

metadata = MetaData()

inbox = Table(
    "holdfast_inbox",
    metadata,
    Column("consumer", String(255), primary_key=True),
    Column("message_id", String(255), primary_key=True),
    Column("handled_at", DateTime(timezone=True), nullable=False, index=True),
)


def create_tables(bind: Engine | Connection) -> None:
    """Create the inbox table where it is missing."""
    metadata.create_all(bind)


class Inbox:
    """Remembers handled messages inside the handler's own transaction."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    def claim(self, session: Session, consumer: str, message_id: str) -> bool:
        """Return whether *message_id* is new to *consumer*, and remember it.

        The memory commits or rolls back with the caller's work. A rival that handles the
        same message right now is waited for.
        """
        values = {
            "consumer": consumer,
            "message_id": message_id,
            "handled_at": self._clock.now(),
        }
        dialect = session.get_bind().dialect.name
        result = session.execute(_insert_if_new(dialect), values)
        return bool(result.rowcount == 1)  # type: ignore[attr-defined]


def _insert_if_new(dialect: str) -> Any:
    match dialect:
        case "sqlite":
            return sqlite.insert(inbox).on_conflict_do_nothing()
        case "postgresql":
            # Without preserve_rowcount SQLAlchemy answers -1 here, which is truthy.
            statement = postgresql.insert(inbox).on_conflict_do_nothing()
            return statement.execution_options(preserve_rowcount=True)
        case "mysql" | "mariadb":
            return mysql.insert(inbox).prefix_with("IGNORE")
        case other:
            raise ConfigurationError(
                f"no dedup statement for {other!r}: use PostgreSQL, MySQL, MariaDB or SQLite"
            )
