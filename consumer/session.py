"""The session that a handler gets: its transaction is not its own to end."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy.orm import Session

from holdfast.errors import ConfigurationError


class TransactionNotYours(ConfigurationError):
    """A handler tried to end the transaction that its dedup row commits with."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"the handler called session.{verb}(): the consumer ends this transaction, together "
            "with the dedup row, or an effect could happen twice. Leave it out; use "
            "session.flush() to send statements, session.begin_nested() for a part that may fail"
        )
        self.verb = verb


class HandlerSession(Session):
    """A `Session` that only the consumer may commit, roll back or close."""

    def commit(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("commit")

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("rollback")

    def close(self) -> NoReturn:
        """Refuse."""
        raise TransactionNotYours("close")

    def end(self, *, commit: bool) -> None:
        """Commit or roll back, and give the connection back; for the consumer alone."""
        try:
            if commit:
                Session.commit(self)
        finally:
            Session.close(self)


def is_handler_session(session: Any) -> bool:
    """Whether the consumer made *session*."""
    return isinstance(session, HandlerSession)
