"""PostgreSQL's errors in replication, translated to what to do about them.

DependencyDown
└── ReplicationDown   the database is gone or restarting; wait
Transient
├── SlotBusy          another reader is on the slot; wait as standby
└── SlotLost          the slot cannot be read any more; make a new one and reconcile
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import errors

from holdfast.errors import ConfigurationError, DependencyDown, Transient
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator


class ReplicationDown(DependencyDown):
    """The database does not answer; nothing was confirmed."""


class SlotBusy(Transient):
    """Somebody else reads the replication slot."""


class SlotLost(Transient):
    """The replication slot is gone, or what it needs is."""


REPLICATION_FIX = (
    "the role may not replicate: run  ALTER ROLE {role} REPLICATION  "
    "(on a managed service grant its replication role, e.g. rds_replication)"
)
READING_FIX = (
    "let its owner run  GRANT SELECT ON <the table> TO <the role>  (and, if it has row-level "
    "security, ALTER ROLE <the role> BYPASSRLS)"
)


@contextmanager
def translated(doing: str, role: str = "…") -> Iterator[None]:
    """Raise what PostgreSQL reports while *doing* something as an error that states the remedy."""
    try:
        yield
    except psycopg.Error as error:
        raise _translation(error, doing, role) from error


def _translation(error: psycopg.Error, doing: str, role: str) -> Exception:
    text = f"{doing}: {mask(str(error)).strip()}"
    match error:
        case errors.ObjectInUse() | errors.DuplicateObject():  # or about to be read
            return SlotBusy(text)
        # A publication that is younger than the slot's position cannot be seen from there.
        case errors.UndefinedObject() | errors.UndefinedFile():
            return SlotLost(text)
        case errors.ObjectNotInPrerequisiteState():
            return SlotLost(text)
        case errors.InsufficientPrivilege() if "replication" not in str(error).lower():
            return ConfigurationError(f"{text}; {READING_FIX}")
        case errors.InsufficientPrivilege():
            return ConfigurationError(f"{text}; {REPLICATION_FIX.format(role=role)}")
        case errors.ConfigurationLimitExceeded():
            return ConfigurationError(f"{text}; raise max_replication_slots, or drop unused slots")
        case errors.InvalidPassword() | errors.InvalidAuthorizationSpecification():
            return ConfigurationError(text)
        case _ if "replication role" in text or "to start WAL sender" in text:
            return ConfigurationError(f"{text}; {REPLICATION_FIX.format(role=role)}")
        case _ if "REPLICATION attribute" in text:
            return ConfigurationError(f"{text}; {REPLICATION_FIX.format(role=role)}")
        case psycopg.OperationalError() | errors.InternalError_():
            return ReplicationDown(text)
        case _:
            return ConfigurationError(text)
