"""Transactions of our own that are tried again when the database breaks them off."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from sqlalchemy.engine import Connection
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    SQLAlchemyError,
    StatementError,
    UnboundExecutionError,
)
from sqlalchemy.orm import scoped_session

from holdfast.classification import recognise
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import DependencyDown, Remedy
from holdfast.isolation import tell_level
from holdfast.scrubbing import text_of
from holdfast.transactions import is_deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy.engine import Engine

T = TypeVar("T")
TRIES = 8
_CHECKS = (3819, 4025)
_LOCKED_SECONDS = 1.0


def committed(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    clock: Clock = SYSTEM_CLOCK,
    tries: int = TRIES,
    randomness: Callable[[], float] = random.random,
) -> T:
    """Return what *work* returned, its transaction committed.

    A deadlock or a serialization failure rolls everything back, so the whole is done again,
    at growing random distances. `DependencyDown` when the database stays away.
    """
    for attempt in range(1, tries + 1):
        try:
            with engine.begin() as db:
                tell_level(db)  # MySQL then locks rows, not gaps
                return work(db)
        except DBAPIError as error:
            if attempt == tries or recognise(error) is not Remedy.RETRY:
                raise down(error) from error
        except SQLAlchemyError as error:
            raise down(error) from error
        clock.sleep(0.01 * 2**attempt * (0.5 + randomness()))
    raise AssertionError("unreachable")


def waits_for(engine: Engine, given: Any) -> bool:
    """Whether a write through *engine* would wait for the transaction of *given*.

    *given* is a session or connection of whoever wants to write. SQLite has one lock for all
    writers: on a second connection they would wait for themselves.
    """
    file = _sqlite_file(engine)
    if file is None:
        return False
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


class TooLarge(DependencyDown):
    """A message is larger than the database takes in one statement: it was not stored."""


def refuse_too_large(engine: Engine, sizes: Iterable[int], error: Exception) -> None:
    """Raise `TooLarge` if that is why *error* came: MySQL only ends the connection then."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return
    largest = max(sizes, default=0)
    try:
        with engine.connect() as db:
            most = int(db.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
    except SQLAlchemyError:
        return  # it is down indeed
    if largest > most:
        raise TooLarge(
            f"a dead letter of {largest:,} bytes is larger than the server's max_allowed_packet "
            f"of {most:,}: raise that, or keep dead letters of this topic on the broker (TopicHome)"
        ) from error


def is_about_data(error: BaseException) -> bool:
    """Whether *error* is about what was to be stored: trying the same again does not help."""
    if isinstance(error, TooLarge):
        return True
    if isinstance(error, DependencyDown) and error.__cause__ is None:
        return False
    cause = _database_error(error)
    if isinstance(cause, DBAPIError):
        return isinstance(cause, (DataError, IntegrityError)) or _is_check(cause)
    return isinstance(cause, (StatementError, ArithmeticError, ValueError, TypeError))


def _is_check(error: DBAPIError) -> bool:
    """Whether a CHECK of MySQL or MariaDB refused the row: their drivers call it operational."""
    number = error.orig.args[0] if error.orig is not None and error.orig.args else None
    return number in _CHECKS


def _database_error(error: BaseException) -> BaseException:
    if isinstance(error, DependencyDown) and error.__cause__ is not None:
        return error.__cause__
    return error


def down(error: Exception) -> DependencyDown:
    """Return what a database *error* means to who wants to store: nothing was stored."""
    cause = getattr(error, "orig", None) or error
    text = text_of(cause).strip().partition("\n")[0][:300]
    fix = ""
    if recognise(error) is Remedy.FIX:
        fix = ": run  holdfast db upgrade  with the same --database, and see its log"
    return DependencyDown(f"the dead-letter store failed with {type(cause).__name__}: {text}{fix}")
