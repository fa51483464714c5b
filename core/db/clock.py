"""The database's clock: the only one that all processes share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class database_now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """POSIX seconds by the database's clock, at the moment it is asked, not of the transaction."""

    type = Double()
    inherit_cache = True


@compiles(database_now, "postgresql")
def _postgresql_now(*_: Any, **__: Any) -> str:
    return "extract(epoch FROM clock_timestamp())"


@compiles(database_now, "mysql")
@compiles(database_now, "mariadb")
def _mysql_now(*_: Any, **__: Any) -> str:
    # In UTC: a local clock shows an hour twice when summer time ends.
    return "(timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1e6)"


@compiles(database_now, "sqlite")
def _sqlite_now(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"
