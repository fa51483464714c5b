"""A transaction that has failed silently: PostgreSQL answers its COMMIT by rolling back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from holdfast.errors import Transient

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

_IN_ERROR = 3  # libpq's PQTRANS_INERROR


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
    given: Any = session
    connection = given.connection() if hasattr(given, "get_bind") else given
    if connection.dialect.name != "postgresql":
        return  # elsewhere a failed statement leaves the transaction as it was
    driver = connection.connection.driver_connection
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is None:
        connection.execute(text("SELECT 1"))  # fails where the transaction has
    elif int(status) == _IN_ERROR:
        raise TransactionAborted
