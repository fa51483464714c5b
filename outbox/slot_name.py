"""The replication slot of one database: a server has one namespace for all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

_UNFIT = re.compile(r"[^a-z0-9_]")


def default_slot(engine: Engine) -> str:
    """Return the slot's name for the database of *engine*."""
    return slot_for(engine.url.database or "")


def slot_for(database: str) -> str:
    """Return the slot's name for the database called *database*."""
    name = _UNFIT.sub("_", database.lower())
    return f"holdfast_outbox_{name}"[:63]
