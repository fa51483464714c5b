"""Opening the database for a command, and closing it again."""

from __future__ import annotations

import os
import pwd
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from holdfast.cli.display import err
from holdfast.db.audit import Operator
from holdfast.db.engine import CONNECT_SECONDS, open_database
from holdfast.errors import ConfigurationError
from holdfast.outbox.schema import require_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Engine


_QUIET_SECONDS = 2.0
"""How long a server may take to answer before somebody wonders."""


def existing_database(url: str, option: str = "--database") -> Engine:
    """Return an engine for *url*; a SQLite file that is not there is not made by looking at it."""
    engine = open_database(url)
    require_file(engine, option)
    if engine.dialect.name != "sqlite":
        event.listen(engine, "do_connect", _connected)
    return engine


@contextmanager
def also_databases(urls: Sequence[str] | None) -> Iterator[list[Engine]]:
    """Yield the databases of other services, as --also names them."""
    engines = [existing_database(url, "--also") for url in urls or ()]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.dispose()


def _connected(dialect: Any, _record: object, args: list[Any], settings: dict[str, Any]) -> Any:
    """Connect; while the server does not answer, say what is waited for."""
    host, port = settings.get("host", "?"), settings.get("port", "")
    words = (
        f"waiting for the database at {host}{f':{port}' if port else ''}, for at most "
        f"{settings.get('connect_timeout', CONNECT_SECONDS)} s"
    )
    notice = threading.Timer(_QUIET_SECONDS, err.print, (words,))
    notice.daemon = True
    notice.start()
    try:
        return dialect.connect(*args, **settings)
    finally:
        notice.cancel()


def require_file(engine: Engine, option: str = "--database") -> None:
    """Raise unless the file of *engine*, if it is one of SQLite's, is there."""
    path = engine.url.database
    is_file = engine.dialect.name == "sqlite" and path not in (None, "", ":memory:")
    if is_file and not str(path).startswith("file:") and not Path(str(path)).exists():
        raise ConfigurationError(
            f"there is no file {path}: look at {option} (only  holdfast db upgrade  makes a "
            "new database)"
        )


def system_user() -> str:
    """Return who runs this command, by the id that the system gives it: no variable says so."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user often has no name
        return f"uid {os.getuid()}"


def account() -> str:
    """Return who this is to the system: its user, the number of that, and the host."""
    return f"{system_user()} ({os.getuid()})@{socket.gethostname()}"


def operator_of(actor: str | None, reason: str) -> Operator:
    """Return who acts and why; the system's user unless told otherwise, and noted in any case."""
    who = system_user() if actor is None else actor
    return Operator(actor=who, reason=reason, account=account())


@contextmanager
def outbox_database(url: str) -> Iterator[Engine]:
    """Yield the database at *url* if it has the outbox tables; say so if it lacks them."""
    engine = existing_database(url)
    try:
        with engine.connect() as db:
            require_tables(db)
        yield engine
    finally:
        engine.dispose()
