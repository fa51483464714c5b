"""Opening the outbox for a command, and closing it again."""

from __future__ import annotations

import getpass
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.database import open_database
from holdfast.outbox.tables import require_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine


def system_user() -> str:
    """Return who runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user often has no name
        return f"uid {os.getuid()}"


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
