"""One part of a transaction that belongs to somebody else: kept, or undone without a trace."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, ResourceClosedError

from holdfast.transactions import take_turns

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session


class Part:
    """A savepoint in the caller's transaction, which goes on whatever becomes of it."""

    def __init__(self, session: Session | Connection) -> None:
        given: Any = session
        self._connection = given.connection() if hasattr(given, "get_bind") else given
        if self._connection.dialect.name == "sqlite":
            take_turns(self._connection)  # else the end of the savepoint would be a commit
        self._savepoint: Any = given.begin_nested()

    def keep(self) -> None:
        """Leave it to the caller's commit; a caller that has ended its transaction has decided."""
        if self._savepoint.is_active:
            self._savepoint.commit()

    def undo(self) -> None:
        """Take back what was done in it; a transaction that has ended took it along.

        MySQL and MariaDB undo the whole transaction at a deadlock, what the caller did before
        included: then nobody may go on in it, or commit the rest.
        """
        if not self._savepoint.is_active and not hasattr(self._savepoint, "session"):
            return
        with suppress(ResourceClosedError):
            try:
                self._savepoint.rollback()
            except DBAPIError:
                self._connection.invalidate()
