"""The attempt ledger: failures, releases and crashes of messages, across all processes.

What the ledger knows about a message: a value to decide by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sqlalchemy import select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import executed, statements
from holdfast.db.text import all_fit, fitted, storable
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError
from holdfast.idempotency.identity import consumer_key, message_key
from holdfast.idempotency.schema import attempt, inbox
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptHistory:
    """How a message has fared with one consumer so far.

    Only *failed* is held against it as an attempt. *crashed* counts starts that ended with
    the death of a process in which nothing else ran: that is proof. *suspected* counts
    those in company: one of several is to blame, and nobody knows which.
    """

    failed: int = 0
    released: int = 0
    crashed: int = 0
    suspected: int = 0
    begun: int = 0
    """Starts by other processes that are neither finished nor, as yet, known to be dead."""
    begun_alone: int = 0
    """Those among them that run on their own: wait until it is known how they end."""
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    last_error: str | None = None
    failing_for: float | None = field(default=None, compare=False)
    """Seconds since the first failure when it was asked, by the database's clock."""

    @property
    def is_suspect(self) -> bool:
        """Whether to run it apart from all that are none."""
        return self.suspected > 0 or self.crashed > 0 or self.begun > 0

    @property
    def is_prime_suspect(self) -> bool:
        """Whether to run it alone, so that a crash has one possible cause.

        Once suspected it had perhaps not even begun; twice, it ran among a few suspects.
        """
        return self.suspected > 1 or self.crashed > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedStart:
    """A start whose process died before the end; its blame is in the ledger already."""

    consumer: str
    message_id: str
    owner: str
    alone: bool
    """Whether nothing else ran there: then this message is counted as crashed."""
    innocent: bool = False
    """Whether it was settled meanwhile; or suspects ran apart there, so that it had not begun."""


CLEAN = AttemptHistory()
"""Nothing is known: the case of nearly every message."""


def judged(owner: str, marks: Sequence[Any]) -> list[AbandonedStart]:
    """Say for each mark of a dead *owner* whether it is proof, suspicion or neither.

    What was settled meanwhile, there or elsewhere, is to blame for nothing; it was company though.
    """
    apart = [mark for mark in marks if mark.alone % 2]
    begun = apart or marks
    return [
        AbandonedStart(
            consumer=mark.consumer,
            message_id=mark.message_id,
            owner=owner,
            alone=len(begun) == 1 and begun[0] is mark,
            innocent=(bool(apart) and not mark.alone % 2) or mark.alone < 0,
        )
        for mark in marks
    ]


def merged(standing: AttemptHistory, row: Any) -> AttemptHistory:
    """Add one row of the ledger, attempt or marks, to what is known."""
    if row.begun:
        return replace(standing, begun=int(row.begun), begun_alone=int(row.begun_alone))
    return replace(
        standing,
        failed=row.failed,
        released=row.released,
        crashed=row.crashed,
        suspected=row.suspected,
        first_failed_at=_moment(row.first_failed_at),
        last_failed_at=_moment(row.last_failed_at),
        last_error=row.last_error,
        failing_for=None if row.failing_for is None else max(0.0, float(row.failing_for)),
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


T = TypeVar("T")

_DEAD_AT_ONCE = 100  # dead owners per sweep
_PRUNED_AT_ONCE = 500
_ACQUITTED_AT_ONCE = 500
_COUNTS = {"failed": 0, "released": 0, "crashed": 0, "suspected": 0, "error": None}


class AttemptLog:
    """Counts what became of messages, so that one that kills its process is found out.

    A process (*owner*) marks what it takes up before any handler runs, one write for a
    whole batch, and removes the marks when it is done, again one write. A mark whose owner
    no longer gives signs of life is a crash. If the batch was in flight together, each
    message is only a suspect. Run suspects with `alone=True` and nothing beside them but other
    suspects: a further crash is counted as the own one of a message that had no company, and
    tells those few that had from the rest. Good messages leave no row behind.

    Every method joins the transaction of *connection*, or commits one of its own, in which
    deadlocks are begun again.
    """

    def __init__(
        self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK, owner_seconds: float = 30.0
    ) -> None:
        if not owner_seconds > 0:
            raise ConfigurationError(f"AttemptLog(owner_seconds={owner_seconds}): use more than 0")
        self.owner_seconds = owner_seconds
        """How long an owner is believed to live after its last sign of life."""
        self._engine = engine
        self._clock = clock
        self._sql = statements("holdfast.idempotency", engine.dialect.name)
        self._seen: dict[str, float] = {}

    def alive(self, owner: str, *, connection: Connection | Session | None = None) -> None:
        """Give a sign of life for *owner*; call it every third of `owner_seconds`."""
        asked = self._clock.monotonic()
        self._run(connection, lambda db: self._greet(db, owner))
        self._seen[owner] = asked

    def owes_sign(self, owner: str) -> bool:
        """Whether *owner* has to give a sign of life before it begins anything."""
        last = self._seen.get(owner, float("-inf"))
        return self._clock.monotonic() - last > self.owner_seconds / 3

    def depart(self, owner: str) -> None:
        """End *owner* in peace: its marks are removed and nobody is blamed."""

        def work(db: Any) -> None:
            for consumer, ids in _by_consumer(
                executed(db, self._sql["marks_of"], {"owner": owner})
            ):
                self._finish(db, consumer, ids, owner)
            executed(db, self._sql["bury"], {"owner": owner})

        self._run(None, work)
        self._seen.pop(owner, None)

    def starting(
        self,
        consumer: str,
        ids: Iterable[str],
        owner: str,
        *,
        alone: bool = False,
        connection: Connection | Session | None = None,
    ) -> None:
        """Mark *ids* as taken up by *owner*; return before any of their handlers runs.

        With *alone* the caller promises that no handler runs in this process until the message
        is finished, but those of messages marked so. It may turn an earlier mark into such a one.
        """
        listed = listed_ids(ids)
        if listed is None:
            return
        asked, due = self._clock.monotonic(), self.owes_sign(owner)
        mark = {"consumer": fitted(consumer), "ids": listed, "owner": owner, "alone": int(alone)}

        def work(db: Any) -> None:
            if due:
                self._greet(db, owner)
            executed(db, self._sql["start"], mark)

        self._run(connection, work)
        if due:
            self._seen[owner] = asked

    def finished(
        self,
        consumer: str,
        ids: Iterable[str],
        owner: str,
        *,
        connection: Connection | Session | None = None,
    ) -> None:
        """Remove the marks of *ids*, whatever came of them: the process outlived them.

        What is known about their failures stays until `forget`.
        """
        kept = list(ids)
        if kept:
            self._run(connection, lambda db: self._finish(db, fitted(consumer), kept, owner))

    def standing(
        self,
        consumer: str,
        ids: Iterable[str],
        *,
        owner: str = "",
        connection: Connection | Session | None = None,
    ) -> dict[str, AttemptHistory]:
        """Return what is known about *ids*; those about which nothing is are left out.

        Marks of *owner* itself do not count as begun by others.
        """
        names = {fitted(id_): id_ for id_ in ids}
        listed = listed_ids(names)
        if listed is None:
            return {}
        wanted = {"consumer": fitted(consumer), "ids": listed, "owner": owner}
        rows = self._run(connection, lambda db: executed(db, self._sql["standing"], wanted).all())
        found: dict[str, AttemptHistory] = {}
        for row in rows:
            id_ = names[row.message_id]
            found[id_] = merged(found.get(id_, CLEAN), row)
        return found

    def failed(
        self,
        consumer: str,
        message_id: str,
        error: BaseException | str,
        *,
        connection: Connection | Session | None = None,
    ) -> AttemptHistory:
        """Count a failed attempt, for which the message is blamed; return its standing.

        Without *connection* this outlives the rollback of the handler's transaction, as it
        should.
        """
        text = error if isinstance(error, str) else told(error)
        return self._count(connection, consumer, message_id, failed=1, error=storable(text))

    def released(
        self, consumer: str, message_id: str, *, connection: Connection | Session | None = None
    ) -> AttemptHistory:
        """Count a release for which nobody is to blame: shutdown, rebalance, open circuit."""
        return self._count(connection, consumer, message_id, released=1)

    def crashed(
        self, consumer: str, message_id: str, *, connection: Connection | Session | None = None
    ) -> AttemptHistory:
        """Count a crash that the caller knows to be this message's own."""
        return self._count(connection, consumer, message_id, crashed=1)

    def orphans(self, *, connection: Connection | Session | None = None) -> list[AbandonedStart]:
        """Turn the marks of dead owners into blame, each exactly once, and return them.

        Call it at the start and now and then; several processes may do so at once. A lone
        mark is a crash of that message. Marks in company make suspects; where some of them were
        made with *alone*, whatever else the owner had taken up had not begun.
        """
        return self._run(connection, self._sweep)

    def acquit(self, *, connection: Connection | Session | None = None) -> int:
        """Forget suspects that the inbox knows as handled; return how many.

        Their process died after the commit, before it could remove the marks; or they were
        handled elsewhere while their marks were being turned into blame. They are settled and
        do not come again, so nobody else would forget them. Call it after `orphans`.
        """
        return self._run(connection, self._acquit)

    def forget(
        self,
        consumer: str,
        ids: Iterable[str],
        *,
        connection: Connection | Session | None = None,
    ) -> None:
        """Remove what is known about *ids*: they were handled, dead-lettered or discarded.

        Also what dead processes may be found to have begun of them later, or are just being
        found to: whoever finds them and this one wait for each other.
        """
        listed = listed_ids(ids)
        if listed is None:
            return
        wanted = {"consumer": fitted(consumer), "ids": listed}

        def work(db: Any) -> None:
            executed(db, self._sql["settle_marks"], wanted)  # first: whoever blames holds the marks
            executed(db, self._sql["forget"], wanted)

        self._run(connection, work)

    def prune(self, *, older_than: float, seconds: float = math.inf) -> int:
        """Forget messages of which nothing was heard for *older_than* seconds; return how many.

        Goes in small steps that never wait for each other, so several may prune at once; after
        *seconds* no further one begins.
        """
        pruned, until = 0, self._clock.monotonic() + seconds
        while step := transact(self._engine, lambda db: self._prune(db, older_than)):
            pruned += step
            if self._clock.monotonic() >= until:
                break
        return pruned

    def _prune(self, db: Connection, age: float) -> int:
        rows = executed(db, self._sql["old_attempts"], {"age": age, "most": _PRUNED_AT_ONCE}).all()
        for consumer, ids in _by_consumer(rows):
            executed(db, self._sql["forget"], {"consumer": consumer, "ids": listed_ids(ids)})
        return len(rows)

    def _run(self, connection: Any, work: Callable[[Any], T]) -> T:
        if connection is not None:
            return work(connection)
        return transact(self._engine, work, clock=self._clock)

    def _greet(self, db: Any, owner: str) -> None:
        # No lease (`core/db/lease.py`), though it has an owner and an end: the row is the owner's
        # own sign of life, made by it alone, and nobody takes it over. One that is late is not
        # fenced either: what it had begun is judged, and its next sign is a new row.
        executed(db, self._sql["greet"], {"owner": owner, "ttl": self.owner_seconds})

    def _finish(self, db: Any, consumer: str, ids: Iterable[str], owner: str) -> None:
        mark = {"consumer": consumer, "ids": listed_ids(ids), "owner": owner}
        executed(db, self._sql["finish"], mark)

    def _count(
        self, connection: Any, consumer: str, message_id: str, **counts: Any
    ) -> AttemptHistory:
        key = {"consumer": fitted(consumer), "id": fitted(message_id)}

        def work(db: Any) -> AttemptHistory:
            executed(db, self._sql["blame"], {**_COUNTS, **key, **counts})
            return self.standing(consumer, [message_id], connection=db)[message_id]

        return self._run(connection, work)

    def _acquit(self, db: Any) -> int:
        suspects = (
            select(attempt.c.consumer, attempt.c.message_id)
            .where((attempt.c.suspected > 0) | (attempt.c.crashed > 0))
            .order_by(attempt.c.changed_at.desc())
            .limit(_ACQUITTED_AT_ONCE)
        )
        acquitted = 0
        for consumer, ids in _by_consumer(db.execute(suspects).all()):
            names = {message_key(id_): id_ for id_ in ids}
            handled = select(inbox.c.message).where(
                inbox.c.consumer == consumer_key(consumer), inbox.c.message.in_(names)
            )
            done = [names[bytes(key)] for key in db.execute(handled).scalars()]
            self.forget(consumer, done, connection=db)
            acquitted += len(done)
        return acquitted

    def _sweep(self, db: Any) -> list[AbandonedStart]:
        found: list[AbandonedStart] = []
        executed(db, self._sql["adopt"], {"ttl": self.owner_seconds})
        for owner in (
            executed(db, self._sql["dead_owners"], {"most": _DEAD_AT_ONCE}).scalars().all()
        ):
            begun = _by_consumer(executed(db, self._sql["marks_of"], {"owner": owner}))
            marks: list[Any] = []
            for consumer, ids in begun:
                mine = {"consumer": consumer, "ids": listed_ids(ids), "owner": owner}
                marks += executed(db, self._sql["lock_marks"], mine).all()
            found += judged(owner, marks)
            for consumer, ids in begun:
                self._finish(db, consumer, ids, owner)
            executed(db, self._sql["bury"], {"owner": owner})
        blamed = sorted(
            (orphan for orphan in found if not orphan.innocent),
            key=lambda orphan: (orphan.consumer, orphan.message_id),
        )
        for orphan in blamed:
            count = "crashed" if orphan.alone else "suspected"
            key = {"consumer": orphan.consumer, "id": orphan.message_id}
            executed(db, self._sql["blame"], {**_COUNTS, **key, count: 1})
        return found


def _by_consumer(rows: Iterable[Any]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for row in rows:
        grouped.setdefault(row.consumer, []).append(row.message_id)
    return sorted(grouped.items())


def listed_ids(ids: Iterable[str]) -> str | None:
    """Return *ids* as one parameter; sorted, so that two writers never wait for each other."""
    kept = sorted(set(ids))
    if not all_fit(kept):
        kept = sorted({fitted(id_) for id_ in kept})
    return msgspec.json.encode(kept).decode() if kept else None
