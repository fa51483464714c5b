"""How far a source was read, so that no late commit slips past.

A database hands out `seq` when a row is inserted, not when it is committed: a reader that goes
on behind the highest number it saw loses rows whose transaction was still open. So a mark moves
to the highest number only once every transaction that may hold a lower one has ended. Those are
looked up, not waited for by the clock: on PostgreSQL whoever holds the lock of a writer on the
table, on MySQL and MariaDB any open transaction. SQLite has one writer at a time. Until then the
rows are read all the same, and read again: the archive keeps each once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import open_database
from holdfast.db.errors import down
from holdfast.dlq.store.schema import message
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.secrets import revealed
from holdfast.urls import mask

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

_LOOK_SECONDS = 0.2
_STALE_SECONDS = 0.3
"""InnoDB shows its transactions from a copy that is renewed once nobody has read it for 0.1 s."""

_MYSQL = ("mysql", "mariadb")

# Who may insert takes this lock before the sequence is asked; prepared transactions keep it.
_POSTGRES_WRITERS = text(
    "SELECT coalesce(l.virtualtransaction, '') || '/' || coalesce(l.pid, 0) FROM pg_locks l"
    " JOIN pg_class c ON c.oid = l.relation"
    " WHERE c.relname = :table AND l.granted AND l.database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',"
    " 'AccessExclusiveLock')"
)
_POSTGRES_STANDBY = text("SELECT pg_is_in_recovery()")
_MYSQL_WRITERS = text(
    "SELECT CONCAT(trx_id, '/', trx_started, '/', trx_mysql_thread_id)"
    " FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> CONNECTION_ID()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """What may be read now: up to *highest*, of which all up to *settled* is there for good."""

    highest: int
    settled: int

    @property
    def is_settled(self) -> bool:
        """Whether nothing can come any more that is not higher than *highest*."""
        return self.settled == self.highest


def store_horizon(url: str, *, mark: int, patience: float, clock: Clock = SYSTEM_CLOCK) -> Horizon:
    """Return what can be read of the store at *url* that was read up to *mark*.

    It waits up to *patience* seconds for open transactions; if one is still open then, the mark
    stays where it was.
    """
    engine = open_database(revealed(url))
    try:
        return _horizon(engine, mark=mark, patience=patience, clock=clock)
    except SQLAlchemyError as error:
        raise down(error) from error
    finally:
        engine.dispose()


def _horizon(engine: Engine, *, mark: int, patience: float, clock: Clock) -> Horizon:
    with engine.connect() as db:
        _refuse_standby(db)
        highest = db.execute(select(func.max(message.c.seq))).scalar() or 0
        db.rollback()
        pause = threading.Event()
        if db.dialect.name in _MYSQL:
            clock.wait(pause, _STALE_SECONDS)
        # After the highest number was seen: whoever comes later gets a higher one.
        open_ones = _writers(db)
        db.rollback()
        until = clock.monotonic() + patience
        while open_ones:
            if clock.monotonic() >= until:
                return Horizon(highest=highest, settled=min(mark, highest))
            clock.wait(pause, _LOOK_SECONDS)
            open_ones &= _writers(db)
            db.rollback()
    return Horizon(highest=highest, settled=highest)


def _writers(db: Connection) -> set[str]:
    """Return the transactions that may have a number which nobody sees yet."""
    match db.dialect.name:
        case "postgresql":
            return set(db.execute(_POSTGRES_WRITERS, {"table": message.name}).scalars())
        case name if name in _MYSQL:
            try:
                return set(db.execute(_MYSQL_WRITERS).scalars())
            except SQLAlchemyError as error:
                raise ConfigurationError(
                    "open transactions cannot be seen, so a late commit could be missed: grant "
                    "this user PROCESS (GRANT PROCESS ON *.* TO …), or read it whole with --full"
                ) from error
        case _:
            return set()


def _refuse_standby(db: Connection) -> None:
    if db.dialect.name == "postgresql" and db.execute(_POSTGRES_STANDBY).scalar():
        raise ConfigurationError(
            f"{mask(str(db.engine.url))} is a standby: it does not know the open transactions of "
            "its primary, so a late commit could be missed; read the primary, or all with --full"
        )
    db.rollback()
