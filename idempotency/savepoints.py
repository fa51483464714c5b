"""A transaction that has failed silently, after an error that the handler swallowed.

PostgreSQL answers its COMMIT by rolling back. MySQL and MariaDB undo the whole transaction at
a deadlock and begin another with the next statement; SQLite does so when its disk is full.

One part of a transaction that belongs to somebody else: kept, or undone without a trace.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, ResourceClosedError

from holdfast.db.transactions import take_turns
from holdfast.errors import Transient

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session


_IN_ERROR = 3  # libpq's PQTRANS_INERROR
_MARK = "holdfast.alive"
_MYSQL = ("mysql", "mariadb")


class TransactionAborted(Transient):
    """The handler went on after an error of the database; a commit would lose its work."""

    def __init__(self) -> None:
        super().__init__(
            "the handler swallowed an error of the database, which has aborted its transaction: "
            "a commit would keep nothing. Let the error out, or put what may fail into "
            "session.begin_nested()"
        )


def require_live(session: Session | Connection) -> None:
    """Raise `TransactionAborted` if a commit of *session* would silently roll back.

    Without it the message would be acknowledged although its effect is gone.
    """
    connection = _connection(session)
    driver = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        marked, _ = connection.info.get(_MARK, (None, False))
        is_ours = marked is not None and marked is connection.get_transaction()
        if is_ours and getattr(driver, "in_transaction", True) is False:
            raise TransactionAborted
        return
    if connection.dialect.name != "postgresql":
        return  # `require_whole` sees it, once
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is None:
        connection.execute(text("SELECT 1"))  # fails where the transaction has
    elif int(status) == _IN_ERROR:
        raise TransactionAborted


def note_begin(session: Session | Connection, *, outer: bool = False) -> None:
    """Mark the transaction, so that `require_whole` can tell whether it is still the same.

    *outer* is for whoever began it; a mark made inside may be rolled back with a savepoint of
    the user's, so it is made again each time.
    """
    connection = _connection(session)
    if connection.dialect.name not in (*_MYSQL, "sqlite"):
        return
    begun = connection.get_transaction()
    if not outer and connection.info.get(_MARK) == (begun, True):
        return
    if connection.dialect.name in _MYSQL:
        connection.exec_driver_sql("SAVEPOINT holdfast_alive")
    elif not getattr(connection.connection.driver_connection, "in_transaction", False):
        return
    connection.info[_MARK] = (begun, outer)


def require_whole(session: Session | Connection) -> None:
    """Raise `TransactionAborted` unless what was done since `note_begin` is still there.

    To be called once, before the commit: MySQL tells only by releasing the mark.
    """
    connection = _connection(session)
    require_live(connection)
    marked, _ = connection.info.pop(_MARK, (None, False))
    if connection.dialect.name not in _MYSQL or marked is not connection.get_transaction():
        return
    try:
        connection.exec_driver_sql("RELEASE SAVEPOINT holdfast_alive")
    except DBAPIError as error:
        if error.connection_invalidated:
            raise  # the server has gone, which is nobody's fault
        raise TransactionAborted from error


def asks_to_be_whole(session: Session | Connection) -> bool:
    """Whether `require_whole` has to ask the database."""
    return _connection(session).dialect.name in _MYSQL


def _connection(session: Any) -> Connection:
    found: Connection = session.connection() if hasattr(session, "get_bind") else session
    return found


class Savepoint:
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
