"""Where dead letters go: a durable place, and the store that everything else here reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.outcomes import failed_again
from holdfast.dlq.store.store import LetterStore
from holdfast.dlq.triage import BUILT_IN, Triage

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.letter import DeadLetter


class DeadLetterDestination(Protocol):
    """A durable place for dead letters."""

    def put(self, letter: DeadLetter, connection: Connection | None = None) -> None:
        """Return only once *letter* is durable, or part of the *connection*'s transaction.

        `DependencyDown` when it is not: the message must not be acknowledged then. Putting
        the same letter again changes nothing.
        """
        ...


class DeadLetterStore(LetterStore):
    """Keeps dead letters in the application's database, one row each however often it is put.

    One that a replay sent and that fails again is told to its plan in the same transaction.
    """

    def __init__(
        self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK, triage: Triage | None = BUILT_IN
    ) -> None:
        super().__init__(engine, clock=clock, triage=triage, on_failed_again=failed_again)
