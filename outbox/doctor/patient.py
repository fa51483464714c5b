"""What the checks look at."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.outbox.doctor.finding import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """One outbox, and by which limits it is judged."""

    engine: Engine
    limits: Limits
    slot: str
    publication: str
    clock: Clock

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """Yield a connection without a transaction, so that looking never pins anything."""
        options = {"isolation_level": "AUTOCOMMIT"}
        with self.engine.connect().execution_options(**options) as db:
            yield db

    def now(self, db: Connection) -> float:
        """Return the database's time in POSIX seconds."""
        own = statements("holdfast.outbox", self.engine.dialect.name)
        return float(db.execute(own["now"]).scalar_one())

    @property
    def sql(self) -> dict[str, TextClause]:
        """The questions that only PostgreSQL answers."""
        return statements("holdfast.outbox.doctor", "postgresql")
