"""The inbox: which messages a handler has already worked off.

The roster: the names behind the numbers in the inbox, and how long each keeps its rows.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, inspect, or_, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.db.engine import require_read_committed
from holdfast.db.sql import statements
from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError
from holdfast.idempotency.claim import Claim, ClaimRequest, claim, unclaim
from holdfast.idempotency.former import (
    UPGRADE_SECONDS,
    FormerScope,
    FormerScopes,
    carried,
    unclaim_carried,
)
from holdfast.idempotency.identity import UNCOMPARED, consumer_key, content_digest, message_key
from holdfast.idempotency.savepoints import note_begin
from holdfast.idempotency.schema import roster, scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

    from holdfast.message import Message


_LONGEST_NAME = 1024


class ConsumerRegistry:
    """Enters each consumer once, in the transaction of its first claim.

    What is known to be committed is not asked for again, so this costs nothing per message.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple[str, float | None], Any]]
        self._known = weakref.WeakKeyDictionary()
        self._fresh: dict[tuple[str, float | None], Any] = {}
        self._formerly: dict[str, FormerScopes] = {}
        self._lock = threading.Lock()

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Say what earlier versions called *consumer*: what they remember is its own."""
        self._formerly[consumer] = formerly

    def enter(
        self, session: Session | Connection, consumer: str, window: float | None
    ) -> tuple[FormerScope, ...]:
        """Make sure that *consumer* stands on the roster; return what it takes over."""
        engine = _engine(session)
        entry = (consumer, window)
        known = self._known.get(engine)
        if known is not None and entry in known:
            former: tuple[FormerScope, ...] = known[entry]
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

    def _former(self, session: Any, consumer: str) -> tuple[FormerScope, ...]:
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
                found.append(FormerScope(row.id, is_written=age < UPGRADE_SECONDS))
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


DEFAULT_WINDOW = "30d"
"""How long a handled message is remembered unless told otherwise."""


class Inbox:
    """Remembers handled messages inside the handler's own transaction.

    A message that comes again within *window* is known. It must be longer than a message
    can be retried, replayed or sent twice; None keeps everything for ever. Rows older than
    that are removed by `prune`.
    """

    def __init__(self, *, window: Duration | None = DEFAULT_WINDOW) -> None:
        self.window = None if window is None else in_seconds(window, of="window")
        self._roster = ConsumerRegistry()

    def claim(self, session: Session | Connection, consumer: str, message_id: str) -> bool:
        """Return whether *message_id* is new to *consumer*, and remember it.

        The memory commits or rolls back with the caller's work. A rival that handles the
        same message right now is waited for.
        """
        return self.claim_all(session, consumer, [by_key(message_id)])[0].is_new

    def claim_many(
        self, session: Session | Connection, consumer: str, messages: Sequence[Message]
    ) -> list[Claim]:
        """Claim *messages* with one statement; one answer for each, true if it is new."""
        return self.claim_all(session, consumer, [wanted(message) for message in messages])

    def claim_all(
        self,
        session: Session | Connection,
        consumer: str,
        items: Sequence[ClaimRequest],
        *,
        hopeful: bool = False,
    ) -> list[Claim]:
        """Claim *items*, whose keys and digests are known already; *hopeful* as in `claim`."""
        given: Any = session
        db: Connection = given.connection() if hasattr(given, "get_bind") else given
        require_read_committed(db)
        former = self.enter(session, consumer)
        claims = claim(db, consumer, items, hopeful=hopeful and not former)
        if former:
            claims = carried(db, consumer, former, items, claims)
        note_begin(db)
        return claims

    def unclaim_all(
        self,
        session: Session | Connection,
        consumer: str,
        claims: Sequence[tuple[ClaimRequest, Claim]],
    ) -> None:
        """Take claims of this transaction back: the messages were not handled after all."""
        unclaim(session, consumer, [item.key for item, _ in claims])
        unclaim_carried(session, claims)

    def enter(self, session: Session | Connection, consumer: str) -> tuple[FormerScope, ...]:
        """Put *consumer* on the roster with the window of this inbox; return what it takes over."""
        return self._roster.enter(session, consumer, self.window)

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Say what earlier versions called *consumer*: what they remember is its own."""
        self._roster.succeed(consumer, formerly)

    def forget(self, session: Session | Connection, consumer: str, ids: Iterable[str]) -> None:
        """Forget messages: they may be handled again.

        *ids* are identities: `message.identity`, or the id of a message without a source.
        """
        unclaim(session, consumer, map(message_key, ids))


def wanted(
    message: Message, visible: Callable[[bytes | None], bytes | None] | None = None
) -> ClaimRequest:
    """Return what is claimed for *message*: its source and id, compared by its payload.

    Of that only what is *visible* counts: hidden fields could be guessed from the digest.
    """
    identity, payload = message.identity, message.payload
    return ClaimRequest(
        key=message_key(identity),
        digest=content_digest(payload if visible is None else visible(payload)),
        whole=b"" if visible is None else content_digest(payload),
        id=message.id,
        identity=identity,
    )


def by_key(text: str) -> ClaimRequest:
    """Return what is claimed where a key of the user's own says what is the same."""
    return ClaimRequest(key=message_key(text), digest=UNCOMPARED, id=text, identity=text)
