"""The session that a handler gets: its transaction is not its own to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session

from holdfast.errors import ConfigurationError
from holdfast.statements import ends_transaction

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import SessionTransaction

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

_GUARD = "holdfast_guard"
_MYSQL = ("mysql", "mariadb")


class TransactionNotYours(ConfigurationError):
    """A handler tried to end the transaction that its dedup row commits with."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"the handler called {verb}: the consumer ends this transaction, together with the "
            "dedup row, or an effect could get lost or happen twice. Leave it out; use "
            "session.flush() to send statements, session.begin_nested() for a part that may fail"
        )
        self.verb = verb


class HandlerSession(Session):
    """A `Session` that only the consumer may commit, roll back or close.

    Its connection refuses to commit as well, and so do statements that would.
    """

    _begun: Any = None
    _guard: dict[str, bool]

    def begin_guarded(self) -> Connection:
        """Begin, and let nobody but `end` end it; the engine is one of `guarded`."""
        self._guard = {"shut": False}  # the BEGIN itself is ours
        connection = self.connection(execution_options={_GUARD: self._guard})
        self._guard["shut"] = True
        self._begun = connection.get_transaction()
        return connection

    def require_ours(self) -> Connection:
        """Return the connection, still in the transaction that was begun."""
        connection = self.connection()
        transaction = connection.get_transaction()
        if transaction is None or transaction is not self._begun or not transaction.is_active:
            raise TransactionNotYours("rollback() on the connection of its session")
        return connection

    def begin(self, nested: bool = False) -> SessionTransaction:
        """Refuse, unless it is a savepoint."""
        if not nested:
            raise TransactionNotYours("session.begin()")
        return super().begin(nested)

    def commit(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.commit()")

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.rollback()")

    def close(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.close()")

    def reset(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.reset()")

    def invalidate(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("session.invalidate()")

    def end(self, *, commit: bool) -> None:
        """Commit or roll back, and give the connection back; for the consumer alone."""
        try:
            if commit:
                self.require_ours()
                self._guard["shut"] = False
                Session.commit(self)
        finally:
            Session.close(self)


def guarded(engine: AnyEngine) -> AnyEngine:
    """Return *engine* for the sessions of handlers: what ends their transaction is refused."""
    own = engine.execution_options()
    target: Any = getattr(own, "sync_engine", own)
    event.listen(target, "commit", _refuse_commit)
    event.listen(target, "before_cursor_execute", _refuse_end)
    return own


def is_handler_session(session: Any) -> bool:
    """Whether the consumer made *session*."""
    return isinstance(session, HandlerSession)


def _is_shut(connection: Connection) -> bool:
    guard = connection.get_execution_options().get(_GUARD)
    return guard is not None and guard["shut"]


def _refuse_commit(connection: Connection) -> None:
    if _is_shut(connection):
        # SQLAlchemy holds a transaction whose commit failed for ended, and would not do it.
        connection.connection.rollback()
        raise TransactionNotYours("commit() on the connection of its session")


def _refuse_end(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    if not _is_shut(connection):
        return
    verb = ends_transaction(statement, mysql=connection.dialect.name in _MYSQL)
    if verb is not None:
        raise TransactionNotYours(verb)
