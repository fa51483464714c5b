"""Sandbox: a handler works in a transaction that ends in a rollback, whatever it tries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.statements import ends_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPICursor


class EndsTransaction(PoisonMessage):
    """The handler tried to end a transaction that is not its own; the consumer refuses it too."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the handler called {what}: the consumer ends its transaction, together with the "
            "dedup row; leave it out"
        )
        self.what = what


class Escaped(ConfigurationError):
    """The handler ended the transaction by a way that nobody can hold back."""


class Sandbox:
    """Runs work between savepoints of one transaction, which never commits.

    What one piece of work wrote the next one sees. Commits are refused where they pass
    SQLAlchemy; one that goes behind its back, to the driver, is noticed. A connection that
    the handler opens by itself is out of reach.
    """

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.connect()
        self._mysql = engine.dialect.name in ("mysql", "mariadb")
        self._refused: list[EndsTransaction] | None = None  # a list while work is done
        event.listen(self._connection, "commit", self._on_commit)
        event.listen(self._connection, "rollback", self._on_rollback)
        event.listen(self._connection, "before_cursor_execute", self._on_statement)

    def __enter__(self) -> Self:
        self._connection.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()
        self._connection.close()

    def run(self, work: Callable[[Session], Any]) -> None:
        """Run *work*; it raises what *work* raises, and then nothing of it is left."""
        savepoint = self._connection.begin_nested()
        session = _GuardedSession(self._connection, join_transaction_mode="create_savepoint")
        try:
            self._work(work, session)
            self._keep(session, savepoint)
        except BaseException as error:
            self._undo(session, savepoint, error)
            raise

    def _work(self, work: Callable[[Session], Any], session: Session) -> None:
        refused: list[EndsTransaction] = []
        self._refused = refused
        try:
            work(session)
            session.flush()
        finally:
            self._refused = None
        if refused:  # and the handler has swallowed it
            raise refused[0]
        # PostgreSQL refuses this after an error that was swallowed, as it would the commit.
        self._connection.exec_driver_sql("SELECT 1")

    def _keep(self, session: _GuardedSession, savepoint: Any) -> None:
        """Let the next ones see what was written."""
        try:
            Session.commit(session)
            savepoint.commit()
        except SQLAlchemyError as error:
            raise _escaped() from error
        Session.close(session)

    def _undo(self, session: Session, savepoint: Any, error: BaseException) -> None:
        """Go back to the savepoint; where there is none any more, begin anew."""
        if isinstance(error, Escaped):
            self._renew()
            return
        try:
            Session.close(session)
            if savepoint.is_active:
                savepoint.rollback()
                return
        except SQLAlchemyError as lost:
            self._renew()
            # A deadlock also ends the transaction, but leaves nothing.
            if isinstance(lost, DBAPIError) and not isinstance(error, DBAPIError):
                raise _escaped() from error
        else:
            self._renew()

    def _renew(self) -> None:
        self._abandon()
        self._connection.begin()

    def _abandon(self) -> None:
        try:
            self._connection.rollback()
        except SQLAlchemyError:
            self._connection.invalidate()
            self._connection.rollback()

    def _on_commit(self, _: Connection) -> None:
        self._refuse("connection().commit()")

    def _on_rollback(self, _: Connection) -> None:
        self._refuse("connection().rollback()")

    def _on_statement(
        self,
        _: Connection,
        __: DBAPICursor,
        statement: str,
        *___: Any,
    ) -> None:
        if self._refused is None:
            return
        if ends_transaction(statement, mysql=self._mysql) is not None:
            self._refuse(f"execute({' '.join(statement.split())[:60]!r})")

    def _refuse(self, what: str) -> None:
        if self._refused is not None:
            self._refused.append(EndsTransaction(f"session.{what}"))
            raise self._refused[-1]


class _GuardedSession(Session):
    """A session that is not the handler's to end, as the consumer's is not."""

    def commit(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.commit()")

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.rollback()")

    def close(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.close()")


def _escaped() -> Escaped:
    return Escaped(
        "the handler ended the transaction around the simulation behind its back: what it wrote "
        "may STAY; look at what it writes, and simulate on a copy, with --handler-database"
    )
