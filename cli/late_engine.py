"""An engine that is made in its first step, so that a start during an outage only waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from holdfast.cli.failures import is_wrong, sentence
from holdfast.errors import ConfigurationError
from holdfast.outbox.outages import unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.outbox import RelayEngine, Step


class LateEngine:
    """Makes the real engine when first asked to step, and again until that works.

    Until a step has gone well once, a database that refuses us is a mistake in the settings
    and ends the relay. Later the same words may mean a failover or new credentials on their
    way, and are waited out.
    """

    def __init__(self, name: str, make: Callable[[], RelayEngine]) -> None:
        self.name = name
        self._make = make
        self._engine: RelayEngine | None = None
        self._is_proven = False

    @property
    def shards(self) -> int:
        """How many shards the engine owns now."""
        return getattr(self._engine, "shards", 0)

    def step(self) -> Step:
        """Make the engine if need be, then do one step of it."""
        try:
            if self._engine is None:
                self._engine = self._make()
            step = self._engine.step()
        except SQLAlchemyError as error:
            if self._is_proven or not is_wrong(error):
                raise
            if isinstance(error, ProgrammingError):
                raise unreadable(error) from error
            raise ConfigurationError(sentence(error)) from error
        self._is_proven = True
        return step

    def close(self) -> None:
        """Close the engine if it was made."""
        if self._engine is not None:
            self._engine.close()
