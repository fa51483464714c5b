"""The isolation level that dedup needs: READ COMMITTED, where a rival's commit is seen."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

_TOO_STRICT = {"REPEATABLE READ", "SERIALIZABLE"}
_levels: weakref.WeakKeyDictionary[Engine, dict[object, str]] = weakref.WeakKeyDictionary()


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
