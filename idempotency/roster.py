"""The roster: the names behind the numbers in the inbox, and how long each keeps its rows."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, inspect, or_, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.errors import ConfigurationError
from holdfast.idempotency.former import UPGRADE_SECONDS, Former, Formerly
from holdfast.idempotency.keys import consumer_key
from holdfast.idempotency.schema import roster, scope
from holdfast.sql import statements

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

_LONGEST_NAME = 1024


class Roster:
    """Enters each consumer once, in the transaction of its first claim.

    What is known to be committed is not asked for again, so this costs nothing per message.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple[str, float | None], Any]]
        self._known = weakref.WeakKeyDictionary()
        self._fresh: dict[tuple[str, float | None], Any] = {}
        self._formerly: dict[str, Formerly] = {}
        self._lock = threading.Lock()

    def succeed(self, consumer: str, formerly: Formerly) -> None:
        """Say what earlier versions called *consumer*: what they remember is its own."""
        self._formerly[consumer] = formerly

    def enter(
        self, session: Session | Connection, consumer: str, window: float | None
    ) -> tuple[Former, ...]:
        """Make sure that *consumer* stands on the roster; return what it takes over."""
        engine = _engine(session)
        entry = (consumer, window)
        known = self._known.get(engine)
        if known is not None and entry in known:
            former: tuple[Former, ...] = known[entry]
            return former
        is_settled = self._write(session, consumer, window)
        former = self._former(session, consumer)
        if is_settled:
            with self._lock:
                self._known.setdefault(engine, {})[entry] = former
        return former

    def _write(self, session: Any, consumer: str, window: float | None) -> bool:
        """Return whether the entry is there and not of this very transaction."""
        number = consumer_key(consumer)
        name = entered_name(consumer)
        wanted = select(roster.c.name, roster.c.window_seconds).where(roster.c.id == number)
        found = session.execute(wanted).one_or_none()
        transaction = session.get_transaction()
        if found is None:
            values = {"id": number, "name": name, "window_seconds": window}
            try:
                with session.begin_nested():
                    session.execute(insert(roster), values)
                    session.execute(insert(scope), {"id": number, "carried_at": 0.0})
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

    def _former(self, session: Any, consumer: str) -> tuple[Former, ...]:
        """Return what earlier versions remember for *consumer*; note when it is taken over."""
        number, formerly = consumer_key(consumer), self._formerly.get(consumer)
        mine = [roster.c.id == number]
        if formerly is not None:
            ends = (name.rpartition(".")[2] for name in formerly.names)
            mine += [roster.c.name.endswith(end, autoescape=True) for end in set(ends)]
        columns = (roster.c.id, roster.c.name, roster.c.window_seconds, scope.c.carried_at)
        rows = session.execute(
            select(*columns).outerjoin(scope, scope.c.id == roster.c.id).where(or_(*mine))
        ).all()
        if all(row.carried_at == 0 for row in rows):
            return ()
        bind = session.get_bind() if hasattr(session, "get_bind") else session
        sql = statements("holdfast.idempotency", bind.dialect.name)
        now = float(session.execute(sql["now"]).scalar_one())
        found = []
        for row in sorted(rows, key=lambda row: row.id != number):
            if row.carried_at == 0:
                continue  # of this version: nothing in it is another's
            if row.id != number and (formerly is None or not formerly.has(row.name)):
                continue
            age = 0.0 if row.carried_at is None else now - row.carried_at
            if row.carried_at is None:
                _take_over(session, row.id, now)
            if row.window_seconds is None or age <= row.window_seconds:
                found.append(Former(row.id, is_written=age < UPGRADE_SECONDS))
        return tuple(found)


def windows(engine: Engine) -> dict[str, float | None]:
    """Return how long each consumer of this database remembers what it handled, by its name.

    None: for ever. Empty where the database has no inbox.
    """
    with engine.connect() as db:
        if not inspect(db).has_table(roster.name):
            return {}
        rows = db.execute(select(roster.c.name, roster.c.window_seconds))
        return {name: seconds for name, seconds in rows}  # noqa: C416 - Rows


def entered_name(consumer: str) -> str:
    """Return *consumer* as it stands on the roster."""
    return consumer.encode("utf-8", "replace").decode().replace("\0", "\\0")[:_LONGEST_NAME]


def _take_over(session: Any, number: int, now: float) -> None:
    try:
        with session.begin_nested():
            session.execute(insert(scope), {"id": number, "carried_at": now})
    except IntegrityError:
        pass  # a rival did, just now


def _engine(session: Any) -> Any:
    bind = session.get_bind() if hasattr(session, "get_bind") else session
    return bind.engine
