"""Where dead letters go: the port that the layer and the consumer write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from holdfast.dlq.letter import DeadLetter


class Home(Protocol):
    """A durable place for dead letters."""

    def put(self, letter: DeadLetter, connection: Connection | None = None) -> None:
        """Return only once *letter* is durable, or part of the *connection*'s transaction.

        `DependencyDown` when it is not: the message must not be acknowledged then. Putting
        the same letter again changes nothing.
        """
        ...
