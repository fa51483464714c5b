"""Isolation levels of our transactions and of handlers', whatever the engine's own level.

SQLAlchemy's option for it asks a MySQL server twice outside of its own error handling: when a
connection is taken and when it is given back, even after the commit. A server that has died would
show as an unknown error of the driver there. So these servers are told by the first statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

_LEVEL = "READ COMMITTED"
_TOLD = "holdfast_read_committed"
_MYSQL = ("mysql", "mariadb")


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
