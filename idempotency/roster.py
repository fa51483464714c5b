"""The roster: the names behind the numbers in the inbox, and how long each keeps its rows."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.errors import ConfigurationError
from holdfast.idempotency.keys import consumer_key
from holdfast.idempotency.schema import roster

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

_LONGEST_NAME = 1024


class Roster:
    """Enters each consumer once, in the transaction of its first claim.

    What is known to be committed is not asked for again, so this costs nothing per message.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, set[tuple[str, float | None]]]
        self._known = weakref.WeakKeyDictionary()
        self._fresh: dict[tuple[str, float | None], Any] = {}
        self._lock = threading.Lock()

    def enter(self, session: Session | Connection, consumer: str, window: float | None) -> None:
        """Make sure that *consumer* stands on the roster with its *window*."""
        engine = _engine(session)
        entry = (consumer, window)
        known = self._known.get(engine)
        if known is not None and entry in known:
            return
        if self._write(session, consumer, window):
            with self._lock:
                self._known.setdefault(engine, set()).add(entry)

    def _write(self, session: Any, consumer: str, window: float | None) -> bool:
        """Return whether the entry is there and not of this very transaction."""
        number = consumer_key(consumer)
        name = consumer.encode("utf-8", "replace").decode().replace("\0", "\\0")[:_LONGEST_NAME]
        wanted = select(roster.c.name, roster.c.window_seconds).where(roster.c.id == number)
        found = session.execute(wanted).one_or_none()
        transaction = session.get_transaction()
        if found is None:
            values = {"id": number, "name": name, "window_seconds": window}
            try:
                with session.begin_nested():
                    session.execute(insert(roster), values)
            except IntegrityError:
                return False  # a rival was first; the next claim finds its entry
        elif found.name != name:
            raise ConfigurationError(
                f"consumers {consumer!r} and {found.name!r} share a number: rename one of them"
            )
        elif found.window_seconds != window:
            change = update(roster).where(roster.c.id == number).values(window_seconds=window)
            session.execute(change)
        else:
            own = self._fresh.get((consumer, window))
            return own is None or own() is not transaction
        with self._lock:
            self._fresh[consumer, window] = weakref.ref(transaction)
        return False


def _engine(session: Any) -> Any:
    bind = session.get_bind() if hasattr(session, "get_bind") else session
    return bind.engine
