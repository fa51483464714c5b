"""What a database error means: a rival's turn, an outage that passes, a mistake, or bad data.

is_deadlock     given up to let a rival go on: the same work may pass now
outage          what it says of the server: whether it passes, and whether the connection is gone
is_wrong        the settings are wrong: it will not pass, nor is anything wrong with the data
is_about_data   what was to be stored is at fault: trying the same again does not help
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from holdfast.classification import recognise
from holdfast.errors import ConfigurationError, DependencyDown, Remedy
from holdfast.scrubbing import text_of
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Engine

_DEADLOCKS = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_MYSQL_DEADLOCKS = frozenset({1020, 1205, 1213})  # changed since read, lock wait timeout, deadlock
_NO_SAVEPOINT = 1305  # MySQL: a deadlock has taken the savepoints with it
_SQLITE_BUSY = frozenset({5, 6})
_MYSQL_DRIVERS = frozenset({"MySQLdb", "aiomysql", "asyncmy", "mariadb", "mysql", "pymysql"})
_PASSING = ("08", "25006", "40", "53", "55006", "55P03", "57", "58")
"""SQLSTATEs of a server that will be well again: connections, read-only, resources, restarts."""
_MYSQL_READ_ONLY = frozenset({1290, 1792, 1836})
_MYSQL_WRONG = frozenset({1142, 1143, 1146})
"""No privilege for a table or column, no such table: pymysql calls these operational."""
# Connection errors carry no SQLSTATE in psycopg, so the server's own words decide.
_WRONG = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|does not exist|"
    r"unable to open database file|permission denied",
    re.IGNORECASE,
)
_MYSQL_REFUSED = frozenset({1044, 1045, 1049, 1698})
"""Access denied, unknown database."""
_MYSQL_CHECKS = frozenset({3819, 4025})
_PRIVILEGE, _MYSQL_PRIVILEGES = "42501", frozenset({1142, 1143})
_GRANTS = (
    "let its owner run  GRANT SELECT, INSERT, UPDATE, DELETE ON holdfast_outbox, "
    "holdfast_outbox_shard, holdfast_outbox_relay, holdfast_outbox_delayed, "
    "holdfast_outbox_parked, holdfast_audit, holdfast_audit_head TO <the relay's role>; "
    "GRANT USAGE ON SEQUENCE holdfast_outbox_seq_seq, holdfast_outbox_delayed_seq_seq "
    "TO <the relay's role>"
)
_POOLED = frozenset({"26000", "42P05"})
"""A prepared statement that is not there, or is there already: another server's connection."""
_POOLER = (
    "a pooler in transaction mode stands between: add  ?prepare_threshold=none  to the database's "
    "URL, or let the pooler keep prepared statements (PgBouncer: max_prepared_statements)"
)
_MYSQL_GRANTS = (
    "let an administrator run  GRANT SELECT, INSERT, UPDATE, DELETE ON <the database>.* "
    "TO <the relay's user>"
)


class TooLarge(DependencyDown):
    """A message is larger than the database takes in one statement: it was not stored."""


class DatabaseDown(DependencyDown):
    """The consumer's database does not answer; nothing was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What an error says of the server of its database, for whoever has to wait or to begin again.

    A statement that fails in the middle says nothing of the server unless its connection went
    with it; while a connection is being made, whatever may pass does.
    """

    passes: bool = False
    """It passes by itself: a server that is away, full, or no longer the primary."""
    lost: bool = False
    """The connection went with it, or the pool had none."""
    away: bool = False
    """So it did, or, if it came while connecting, none can be made now."""
    again: bool = False
    """The whole may be done again at once: a rival, or a connection that was cut."""


WELL = Outage()
_NONE_FREE = Outage(lost=True, away=True)


def is_deadlock(error: BaseException) -> bool:
    """Whether the database gave *error* up to let a rival go on: the same work may pass now."""
    origin: Any = getattr(error, "orig", None) or error
    if _state(origin) in _DEADLOCKS:
        return True
    code = getattr(origin, "sqlite_errorcode", None)
    if isinstance(code, int):
        return code & 0xFF in _SQLITE_BUSY
    driver = type(origin).__module__.split(".")[0]
    if not isinstance(error, DBAPIError) and driver not in _MYSQL_DRIVERS:
        return False  # a KeyError(1213) is no deadlock
    number = _number(origin)
    if number == _NO_SAVEPOINT:
        return error.__context__ is not None and is_deadlock(error.__context__)
    return number in _MYSQL_DEADLOCKS


def outage(error: BaseException) -> Outage:
    """Return what *error* says of the server of its database; `WELL` where it says nothing."""
    if isinstance(error, PoolTimeout):
        return _NONE_FREE
    if not isinstance(error, DBAPIError):
        return WELL
    lost, remedy = error.connection_invalidated, recognise(error)
    may_pass = remedy is None or remedy is Remedy.RETRY
    return Outage(
        passes=_passes(error),
        lost=lost,
        away=lost or (may_pass and isinstance(error, (OperationalError, InterfaceError))),
        again=remedy is Remedy.RETRY,
    )


def _passes(error: DBAPIError) -> bool:
    number = _number(error.orig)
    if number in _MYSQL_WRONG:
        return False
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return True
    return _state(error.orig).startswith(_PASSING) or number in _MYSQL_READ_ONLY


def is_about_data(error: BaseException) -> bool:
    """Whether *error* is about what was to be stored: trying the same again does not help."""
    if isinstance(error, TooLarge):
        return True
    if isinstance(error, DependencyDown):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    if isinstance(error, DBAPIError):
        # A CHECK of MySQL or MariaDB refused the row: their drivers call it operational.
        is_check = _number(error.orig) in _MYSQL_CHECKS
        return isinstance(error, (DataError, IntegrityError)) or is_check
    return isinstance(error, (StatementError, ArithmeticError, ValueError, TypeError))


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
            f"of {most:,}: raise that, or keep dead letters of this topic on the broker "
            "(DeadLetterTopic)"
        ) from error


def down(error: Exception) -> DependencyDown:
    """Return what a database *error* means to who wants to store: nothing was stored."""
    cause = getattr(error, "orig", None) or error
    text = text_of(cause).strip().partition("\n")[0][:300]
    fix = ""
    if recognise(error) is Remedy.FIX:
        fix = ": run  holdfast db upgrade  with the same --database, and see its log"
    return DependencyDown(f"the dead-letter store failed with {type(cause).__name__}: {text}{fix}")


def is_wrong(error: Exception) -> bool:
    """Whether a database *error* says that the settings are wrong, not that it is down."""
    if not isinstance(error, OperationalError):
        return isinstance(error, SQLAlchemyError) and not outage(error).passes
    refused = _number(error.orig) in _MYSQL_REFUSED
    return refused or _WRONG.search(str(error.orig)) is not None


def unreadable(error: DBAPIError) -> ConfigurationError:
    """Return what to fix about *error*, which is no outage."""
    state, number, fix = _state(error.orig), _number(error.orig), ""
    if state == _PRIVILEGE:
        fix = f"; {_GRANTS}"
    elif state in _POOLED:
        fix = f"; {_POOLER}"
    elif number in _MYSQL_PRIVILEGES:
        fix = f"; {_MYSQL_GRANTS}"
    return ConfigurationError(f"the outbox cannot be read: {short(error)}{fix}")


def short(error: Exception) -> str:
    """Return what *error* says, without secrets, statements and links."""
    return mask(str(error)).split("\n[SQL", 1)[0].split("\n(Background", 1)[0]


def _state(origin: object) -> str:
    """Return the SQLSTATE that the driver's error *origin* has."""
    return getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None) or ""


def _number(origin: object) -> int | None:
    """Return the number that MySQL's drivers put first."""
    args = getattr(origin, "args", ())
    return args[0] if args and isinstance(args[0], int) else None
