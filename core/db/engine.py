"""Opening the database that holds outbox, inbox and the other tables, and how it isolates us.

Our transactions and handlers' are at READ COMMITTED, whatever the engine's own level: a rival's
commit is seen. SQLAlchemy's option for it asks a MySQL server twice outside of its own error
handling: when a connection is taken and when it is given back, even after the commit. A server
that has died would show as an unknown error of the driver there. So these servers are told by the
first statement.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from holdfast.errors import ConfigurationError, MissingExtra
from holdfast.urls import mask

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, Connection
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

_LIBPQ = ("psycopg", "psycopg2")
_EXTRAS = {"psycopg": "postgres", "psycopg2": "postgres", "pymysql": "mysql", "MySQLdb": "mysql"}
_BUSY_SECONDS = 60.0
_READING = "holdfast_reading"
_PREPARE = "prepare_threshold"
CONNECT_SECONDS = 10
"""How long a server may take to answer before it counts as down; the URL may say otherwise."""
_LEVEL = "READ COMMITTED"
_TOLD = "holdfast_read_committed"
_MYSQL = ("mysql", "mariadb")
_TOO_STRICT = {"REPEATABLE READ", "SERIALIZABLE"}
_levels: weakref.WeakKeyDictionary[Engine, dict[object, str]] = weakref.WeakKeyDictionary()
_NOTICED = {
    "connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": 30_000, "keepalives_idle": 30,
    "keepalives_interval": 10, "keepalives_count": 3,
}  # fmt: skip
"""libpq's settings by which a server that does not answer is given up, and a connection that was
cut without a word ends within a minute."""


def open_database(url: str | Engine, *, users: int | None = None, **native: Any) -> Engine:
    """Return an engine for *url*; *native* settings go to SQLAlchemy untouched.

    *users* is how many threads use connections all the time. So many are kept, once they were
    needed at once, and the last one used goes first: it knows the statements. SQLAlchemy's own
    pool keeps five, and would open and close the others again and again.

    SQLite files are opened for several processes: WAL, a patient busy timeout, and the
    write lock taken when a transaction begins, so that no transaction fails half-way with
    "database is locked".
    """
    if isinstance(url, Engine):
        return url
    try:
        parsed = _parsed(url)
        if users is not None and parsed.get_backend_name() != "sqlite":
            native = {"pool_size": users, "pool_use_lifo": True} | native
        if parsed.get_backend_name() == "sqlite":
            native.setdefault("connect_args", {"timeout": _BUSY_SECONDS})
        if parsed.get_driver_name() in _LIBPQ:
            native["connect_args"] = noticed(parsed) | native.get("connect_args", {})
        own_timeout = "read_timeout" in parsed.query or "read_timeout" in native.get(
            "connect_args", {}
        )
        if parsed.get_driver_name() == "pymysql" and not own_timeout:
            native["connect_args"] = {"read_timeout": CONNECT_SECONDS} | native.get(
                "connect_args", {}
            )
        parsed = _prepared(parsed, native)
        engine = create_engine(parsed, **native)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"{mask(str(url))!r} is not a database URL: write postgresql+psycopg://user@host/db, "
            "mysql+pymysql://user@host/db or sqlite:///file.db"
        ) from error
    except ModuleNotFoundError as error:
        raise MissingExtra(_EXTRAS.get(str(error.name), "all"), str(error.name)) from error
    if engine.dialect.name == "sqlite":
        _share(engine)
    elif parsed.get_driver_name() == "pymysql" and not own_timeout:
        event.listen(engine, "connect", _patient)
    return engine


def _parsed(url: Any) -> URL:
    try:
        return make_url(url)
    except ValueError as error:  # of int(), for what stands where the port should
        raise ConfigurationError(
            f"{mask(str(url))!r} has a port that is no number: write "
            "postgresql+psycopg://user@host:5432/db, and percent-encode / : ? # and @ in a password"
        ) from error


def _patient(connection: Any, _record: object) -> None:
    """Let statements take their time: the timeout was meant for the greeting of the server."""
    connection._read_timeout = None  # nothing public sets it later


def noticed(url: URL) -> dict[str, Any]:
    """Return libpq's settings for noticing a cut connection, but those that *url* has itself.

    The kernel would wait for a quarter of an hour, and a relay with it.
    """
    return {name: value for name, value in _NOTICED.items() if name not in url.query}


def _prepared(url: URL, native: dict[str, Any]) -> URL:
    """Move psycopg's prepare_threshold out of *url*, where it could be nothing but text."""
    text = url.query.get(_PREPARE)
    if url.get_driver_name() != "psycopg" or text is None:
        return url
    if text != "none" and not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{_PREPARE}={text}: use a number, or none behind a pooler")
    settings = {_PREPARE: None if text == "none" else int(text)}
    native["connect_args"] = settings | native.get("connect_args", {})
    return url.difference_update_query([_PREPARE])


def reading(engine: Engine) -> Engine:
    """Return *engine* for transactions that only read: on SQLite they keep no writer waiting."""
    return engine.execution_options(**{_READING: True})


def looking(engine: Engine) -> Engine:
    """Return *engine* for statements that stand alone, without transactions on PostgreSQL.

    That saves two round trips; MySQL's drivers would ask the server to leave them out.
    """
    if engine.dialect.name != "postgresql":
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def _share(engine: Engine) -> None:
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's BEGIN below, not the driver's own
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")

    def begun(connection: Connection) -> None:
        reads = connection.get_execution_options().get(_READING)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)


def at_read_committed(engine: AnyEngine) -> AnyEngine:
    """Return *engine* whose transactions see what others have committed; make it once, keep it."""
    options = engine.get_execution_options()
    if engine.dialect.name == "sqlite" or options.get(_TOLD):  # which has one writer at a time
        return engine
    if options.get("isolation_level") == _LEVEL:
        return engine
    if _is_told_by_statement(engine):
        own = engine.execution_options(**{_TOLD: True})
        target: Any = getattr(own, "sync_engine", own)
        event.listen(target, "begin", _say)
        return own
    return engine.execution_options(isolation_level=_LEVEL)


def at_one_moment(engine: Engine) -> Connection:
    """Return a connection whose queries all see the moment of the first; the caller closes it."""
    if not _is_told_by_statement(engine):
        return engine.connect().execution_options(isolation_level="REPEATABLE READ")
    db = engine.connect()
    try:
        db.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    except BaseException:
        db.close()
        raise
    return db


def for_transaction(engine: Engine) -> Engine:
    """Return *engine* for one transaction that begins with `tell_level`; costs next to nothing."""
    return engine if _is_told_by_statement(engine) else at_read_committed(engine)


def tell_level(db: Connection) -> None:
    """Say the level, where a statement does; the transaction holds nothing yet."""
    options = db.get_execution_options()
    is_told = options.get(_TOLD) or options.get("isolation_level") == _LEVEL
    if db.dialect.name in _MYSQL and not is_told:
        _say(db)


def _is_told_by_statement(engine: Any) -> bool:
    dialect = engine.dialect
    if dialect.name not in _MYSQL:
        return False
    stated = engine.get_execution_options().get("isolation_level")
    level = getattr(dialect, "_on_connect_isolation_level", None) if stated is None else stated
    return bool(level != "AUTOCOMMIT")  # where no transaction begins before the option says so


def _say(db: Connection) -> None:
    db.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {_LEVEL}")


def require_read_committed(session: Session | Connection) -> None:
    """Refuse a PostgreSQL transaction in which a rival's commit would fail ours (40001).

    The level is asked once for each engine and setting. MySQL and MariaDB read what is
    committed when they write, whatever the level; SQLite has one writer at a time.
    """
    given: Any = session
    connection = given.connection() if hasattr(given, "get_bind") else given
    if connection.dialect.name != "postgresql":
        return
    known = _levels.setdefault(connection.engine, {})
    option = connection.get_execution_options().get("isolation_level")
    level = known.get(option)
    if level is None:
        level = known[option] = str(connection.get_isolation_level()).upper()
    if level in _TOO_STRICT:
        raise ConfigurationError(
            f"the transaction is at {level}, where a rival with the same message makes it fail: "
            'use READ COMMITTED, e.g. create_engine(url, isolation_level="READ COMMITTED") or '
            'engine.execution_options(isolation_level="READ COMMITTED") for the handlers'
        )
