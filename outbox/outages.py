"""A database that is away for a while, and one that has to be set up better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import OperationalError

from holdfast.errors import ConfigurationError
from holdfast.urls import mask

if TYPE_CHECKING:
    from sqlalchemy.exc import DBAPIError

_PASSING = ("08", "25006", "40", "53", "55006", "55P03", "57", "58")
"""SQLSTATEs of a server that will be well again: connections, read-only, resources, restarts."""
_MYSQL_READ_ONLY = frozenset({1290, 1792, 1836})
_MYSQL_WRONG = frozenset({1142, 1143, 1146})
"""No privilege for a table or column, no such table: pymysql calls these operational."""
_PRIVILEGE, _MYSQL_PRIVILEGES = "42501", frozenset({1142, 1143})
_GRANTS = (
    "let its owner run  GRANT SELECT, INSERT, UPDATE, DELETE ON holdfast_outbox, "
    "holdfast_outbox_shard, holdfast_outbox_relay, holdfast_outbox_delayed, "
    "holdfast_outbox_parked, holdfast_audit, holdfast_audit_head TO <the relay's role>; "
    "GRANT USAGE ON SEQUENCE holdfast_outbox_seq_seq, holdfast_outbox_delayed_seq_seq "
    "TO <the relay's role>"
)
_POOLED = frozenset({"26000", "42P05"})
"""A prepared statement that is not there, or is there already: another server's connection."""
_POOLER = (
    "a pooler in transaction mode stands between: add  ?prepare_threshold=none  to the database's "
    "URL, or let the pooler keep prepared statements (PgBouncer: max_prepared_statements)"
)
_MYSQL_GRANTS = (
    "let an administrator run  GRANT SELECT, INSERT, UPDATE, DELETE ON <the database>.* "
    "TO <the relay's user>"
)


def is_outage(error: DBAPIError) -> bool:
    """Whether *error* passes by itself: a server that is away, full, or no longer the primary."""
    number = _number(error)
    if number in _MYSQL_WRONG:
        return False
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return True
    return _state(error).startswith(_PASSING) or number in _MYSQL_READ_ONLY


def unreadable(error: DBAPIError) -> ConfigurationError:
    """Return what to fix about *error*, which is no outage."""
    fix = ""
    if _state(error) == _PRIVILEGE:
        fix = f"; {_GRANTS}"
    elif _state(error) in _POOLED:
        fix = f"; {_POOLER}"
    elif _number(error) in _MYSQL_PRIVILEGES:
        fix = f"; {_MYSQL_GRANTS}"
    return ConfigurationError(f"the outbox cannot be read: {short(error)}{fix}")


def _state(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""


def _number(error: DBAPIError) -> object:
    origin: Any = error.orig
    return origin.args[0] if getattr(origin, "args", ()) else None


def short(error: Exception) -> str:
    """Return what *error* says, without secrets, statements and links."""
    return mask(str(error)).split("\n[SQL", 1)[0].split("\n(Background", 1)[0]
