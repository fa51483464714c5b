"""Transactions of our own: short, and begun again when the database breaks a deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError

from holdfast.backoff import Backoff
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.isolation import for_transaction, tell_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection, Engine

T = TypeVar("T")

DEADLOCKS: Final = Backoff(first=0.02, ceiling=1.0, attempts=12)
"""How often a transaction is begun again after the database has chosen it as the victim."""

_SQLSTATES = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_MYSQL = frozenset({1020, 1205, 1213})  # changed since read, lock wait timeout, deadlock
_NO_SAVEPOINT = 1305  # MySQL: a deadlock has taken the savepoints with it
_SQLITE_BUSY = frozenset({5, 6})
_DRIVERS = frozenset({"MySQLdb", "aiomysql", "asyncmy", "mariadb", "mysql", "pymysql"})


def is_deadlock(error: BaseException) -> bool:
    """Whether the database gave *error* up to let a rival go on: the same work may pass now."""
    origin: Any = getattr(error, "orig", None) or error
    state = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
    if state in _SQLSTATES:
        return True
    code = getattr(origin, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF in _SQLITE_BUSY
    if not isinstance(error, DBAPIError) and type(origin).__module__.split(".")[0] not in _DRIVERS:
        return False  # a KeyError(1213) is no deadlock
    number = origin.args[0] if origin.args else None
    if number == _NO_SAVEPOINT:
        return error.__context__ is not None and is_deadlock(error.__context__)
    return isinstance(number, int) and number in _MYSQL


def transact(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    clock: Clock = SYSTEM_CLOCK,
    backoff: Backoff = DEADLOCKS,
) -> T:
    """Return what *work* returns, once its transaction has committed.

    A deadlock rolls it back and begins it again after a random wait, so *work* must change
    nothing but the database. READ COMMITTED, whatever the engine's own level: a rival's
    commit is seen instead of failing us.
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
        except DBAPIError as error:
            delay = backoff.delay(attempt) if is_deadlock(error) else None
            if delay is None:
                raise
        clock.sleep(delay)


def take_turns(db: Connection) -> None:
    """Take SQLite's write lock now: an engine of the caller's own may begin without it."""
    raw: Any = db.connection.driver_connection
    if getattr(raw, "in_transaction", None) is False:
        db.exec_driver_sql("BEGIN IMMEDIATE")
