"""Opening the outbox for a command, and closing it again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.database import open_database
from holdfast.outbox.tables import require_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine


@contextmanager
def outbox_database(url: str) -> Iterator[Engine]:
    """Yield the database at *url* if it has the outbox tables; say so if it lacks them."""
    engine = open_database(url)
    try:
        with engine.connect() as db:
            require_tables(db)
        yield engine
    finally:
        engine.dispose()
