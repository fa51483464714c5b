"""Databases with all tables, as `holdfast migrate` leaves them, without the wait."""

from __future__ import annotations

import sqlite3
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, inspect
from sqlalchemy.pool import StaticPool

from holdfast.cli.migrations.history import Migrations

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine


def migrated(engine: Engine) -> None:
    """Bring the database of *engine* to the newest schema; an empty one of SQLite is a copy."""
    if engine.dialect.name != "sqlite" or inspect(engine).get_table_names():
        Migrations(engine).upgrade()
        return
    raw = engine.raw_connection()
    try:
        own = raw.driver_connection
        assert isinstance(own, sqlite3.Connection)
        _template().backup(own)
    finally:
        raw.close()


@cache
def _template() -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", check_same_thread=False)
    engine = create_engine("sqlite://", creator=lambda: memory, poolclass=StaticPool)
    Migrations(engine).upgrade()
    return memory
