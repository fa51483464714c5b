"""What every package shares that keeps tables: clock, leases, types, texts, audit, transactions.

A caller's engine or connection comes in; nothing here opens a database of its own accord. Every
moment that processes agree on is the database's, and every act that is audited commits with it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.db.engine import open_database

__all__ = ["open_database"]


def __getattr__(name: str) -> Any:
    # SQLAlchemy takes its time, and texts for columns need none of it.
    if name != "open_database":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.db.engine import open_database

    return open_database
