"""Transactions of our own: short, at READ COMMITTED, begun again when a rival broke them off."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, UnboundExecutionError

from holdfast.backoff import Backoff, Jitter
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import for_transaction, tell_level
from holdfast.db.errors import down, is_deadlock, outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

T = TypeVar("T")

DEADLOCKS: Final = Backoff(first=0.02, ceiling=1.0, attempts=12)
"""How often a transaction is begun again after the database has chosen it as the victim."""
_LOCKED_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPolicy:
    """Which errors begin a transaction again, how often, and as what the others are raised."""

    retried: Callable[[DBAPIError], bool] = is_deadlock
    backoff: Backoff = DEADLOCKS
    raised: Callable[[SQLAlchemyError], Exception] | None = None
    """What an error of the database becomes; None leaves it as it is."""


AS_IT_IS: Final = ErrorPolicy()
"""Deadlocks are begun again; whatever else the database says is raised as it is."""
AS_DEPENDENCY: Final = ErrorPolicy(
    retried=lambda error: outage(error).again,
    backoff=Backoff(first=0.03, ceiling=2.0, attempts=8, jitter=Jitter.EQUAL),
    raised=down,
)
"""What passes is begun again, also on a new connection; the rest is raised as `DependencyDown`."""


def transact(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    clock: Clock = SYSTEM_CLOCK,
    errors: ErrorPolicy = AS_IT_IS,
) -> T:
    """Return what *work* returns, once its transaction has committed.

    An error that *errors* retries rolls it back and begins it again after a random wait, so
    *work* must change nothing but the database. READ COMMITTED, whatever the engine's own level:
    a rival's commit is seen instead of failing us, and MySQL locks rows, not gaps. On SQLite the
    write lock is taken first, so that nothing fails half-way.
    """
    engine, attempt = for_transaction(engine), 0
    while True:
        attempt += 1
        try:
            with engine.begin() as db:
                if engine.dialect.name == "sqlite":
                    take_turns(db)
                tell_level(db)
                return work(db)
        except SQLAlchemyError as error:
            again = isinstance(error, DBAPIError) and errors.retried(error)
            delay = errors.backoff.delay(attempt) if again else None
            if delay is None:
                if errors.raised is None:
                    raise
                raise errors.raised(error) from error
        clock.sleep(delay)


def committed(engine: Engine, work: Callable[[Connection], T], *, clock: Clock = SYSTEM_CLOCK) -> T:
    """Return what *work* returns, once committed; `DependencyDown` when the database stays away."""
    return transact(engine, work, clock=clock, errors=AS_DEPENDENCY)


def take_turns(db: Connection) -> None:
    """Take SQLite's write lock now: an engine of the caller's own may begin without it."""
    raw: Any = db.connection.driver_connection
    if getattr(raw, "in_transaction", None) is False:
        db.exec_driver_sql("BEGIN IMMEDIATE")


def waits_for(engine: Engine, given: Any) -> bool:
    """Whether a write through *engine* would wait for the transaction of *given*.

    *given* is a session or connection of whoever wants to write. SQLite has one lock for all
    writers: on a second connection they would wait for themselves.
    """
    file = _sqlite_file(engine)
    if file is None:
        return False
    from sqlalchemy.orm import scoped_session  # a relay does without, and starts the sooner

    session = given() if isinstance(given, scoped_session) else given
    try:
        bound = session.get_bind() if hasattr(session, "get_bind") else session
    except UnboundExecutionError:
        return False
    # A session may have ended its part in the transaction of a connection that goes on.
    begun = session.in_transaction() or (isinstance(bound, Connection) and bound.in_transaction())
    return begun and _sqlite_file(bound.engine) == file and _is_locked(file)


def _sqlite_file(engine: Engine) -> str | None:
    """Return the file of a database of SQLite, however its URL spells it; None without one."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or ":memory:" in name or "mode=memory" in name:
        return None
    return os.path.realpath(unquote(urlsplit(name).path) if name.startswith("file:") else name)


def _is_locked(file: str) -> bool:
    """Whether no writer could commit to *file* now; many that begin a transaction hold no lock."""
    try:
        uri = f"{Path(file).as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, _LOCKED_SECONDS, isolation_level=None, uri=True)) as db:
            db.execute("BEGIN EXCLUSIVE")  # under WAL it lets readers be
            db.execute("ROLLBACK")
    except sqlite3.Error as error:
        return is_deadlock(error)
    return False
