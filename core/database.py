"""Opening the database that holds outbox, inbox and the other tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from holdfast.errors import ConfigurationError, MissingExtra
from holdfast.urls import mask

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, Connection

_LIBPQ = ("psycopg", "psycopg2")
_EXTRAS = {"psycopg": "postgres", "psycopg2": "postgres", "pymysql": "mysql", "MySQLdb": "mysql"}
_BUSY_SECONDS = 60.0
_READING = "holdfast_reading"
_PREPARE = "prepare_threshold"
CONNECT_SECONDS = 10
"""How long a server may take to answer before it counts as down; the URL may say otherwise."""
_NOTICED = {
    "connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": 30_000, "keepalives_idle": 30,
    "keepalives_interval": 10, "keepalives_count": 3,
}  # fmt: skip
"""libpq's settings by which a server that does not answer is given up, and a connection that was
cut without a word ends within a minute."""


def open_database(url: str | Engine, **native: Any) -> Engine:
    """Return an engine for *url*; *native* settings go to SQLAlchemy untouched.

    SQLite files are opened for several processes: WAL, a patient busy timeout, and the
    write lock taken when a transaction begins, so that no transaction fails half-way with
    "database is locked".
    """
    if isinstance(url, Engine):
        return url
    try:
        parsed = _parsed(url)
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
