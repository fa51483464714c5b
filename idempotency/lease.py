"""Leases: one worker at a time for a message whose effect is outside the database.

Leases in the database, beside the inbox that remembers what was handled.
"""

from __future__ import annotations

import copy
import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import and_, bindparam, delete, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.lease import LeaseColumns
from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.errors import StaleDelivery
from holdfast.idempotency.claim import ClaimRequest, claim, keep_result, known
from holdfast.idempotency.former import FormerScope, FormerScopes, bare_key, carried, known_formerly
from holdfast.idempotency.identity import consumer_key
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.schema import lease as leases
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

    from holdfast.durations import Duration


log = logging.getLogger("holdfast.idempotency")


class InProgress(StaleDelivery):
    """Another worker is at this message right now; nobody is to blame, come again later."""

    def __init__(self, consumer: str, message_id: str, retry_after: float) -> None:
        super().__init__(
            f"message {message_id} is being handled by another worker of {consumer}; its lease "
            f"lasts {retry_after:.1f} s more"
        )
        self.consumer = consumer
        self.message_id = message_id
        self.retry_after = retry_after


class LeaseLost(StaleDelivery):
    """The lease ran out and another worker took the message over: this end of it is refused."""

    def __init__(self, consumer: str, message_id: str) -> None:
        super().__init__(
            f"the lease on message {message_id} ran out and another worker of {consumer} has "
            "taken it over: this result is refused; use a longer lease, or pass "
            "attempt.idempotency_key on so that the other side does the work once"
        )
        self.consumer = consumer
        self.message_id = message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to work on a message; *token* is greater than that of every lease before."""

    consumer: str
    wanted: ClaimRequest
    token: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """The message was handled before, and this was its result."""

    result: bytes | None = None


class LeaseStore(Protocol):
    """Where leases and handled messages are kept; every time is measured by the store's clock."""

    def take(self, consumer: str, wanted: ClaimRequest, seconds: float) -> Lease | Handled:
        """Return a lease that no other worker has, or what is known about a handled message.

        Raises `InProgress` while another's lease lasts, `IdempotencyConflict` for other content.
        """
        ...

    def renew(self, lease: Lease) -> bool:
        """Make *lease* last its seconds from now; False if it was freed or is another's."""
        ...

    def complete(self, lease: Lease, result: bytes | None) -> None:
        """Remember the message as handled; raises `LeaseLost` if another took it over."""
        ...

    def free(self, lease: Lease) -> None:
        """Give *lease* back after a failure, so that the next attempt need not wait."""
        ...


class LeaseMemory(ABC):
    """What a `LeaseStore` may do beyond that: it says so by inheriting this."""

    @property
    @abstractmethod
    def window(self) -> float | None:
        """How long a handled message is remembered, in seconds; None for ever."""

    @abstractmethod
    def with_window(self, window: Duration | None) -> LeaseStore:
        """Return the same store that remembers handled messages for *window*."""

    @abstractmethod
    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""


class Heartbeat:
    """Renews leases while their handlers run; one thread, and none while there are none."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Lease, Callable[[Lease], bool]] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease, renew: Callable[[Lease], bool]) -> None:
        """Call *renew* at every third of the lease, until `drop` or until it says no."""
        with self._lock:
            self._kept[lease] = renew
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-lease-heartbeat", daemon=True
                )
                self._thread.start()
        self._changed.set()

    def drop(self, lease: Lease) -> None:
        """Renew *lease* no more."""
        with self._lock:
            self._kept.pop(lease, None)
        self._changed.set()

    def _run(self) -> None:
        due: dict[Lease, float] = {}
        while True:
            now = self._clock.monotonic()
            with self._lock:
                if not self._kept:
                    self._thread = None
                    return
                kept = dict(self._kept)
                self._changed.clear()
            due = {lease: due.get(lease, now + lease.seconds / 3) for lease in kept}
            away: set[object] = set()
            for lease in [lease for lease, at in due.items() if at <= now]:
                store = getattr(kept[lease], "__self__", kept[lease])
                # A store that is away is asked once a round, or its timeouts would add up.
                if store in away or not self._renew(lease, kept[lease]):
                    away.add(store)
                    due[lease] = self._clock.monotonic() + min(1.0, lease.seconds / 10)
                else:
                    due[lease] = self._clock.monotonic() + lease.seconds / 3
            rest = min(due.values()) - self._clock.monotonic()
            if rest > 0:
                self._clock.wait(self._changed, rest)

    def _renew(self, lease: Lease, renew: Callable[[Lease], bool]) -> bool:
        """Renew *lease*, or drop it if it is another's; False if the store does not answer."""
        try:
            still = renew(lease)
        except Exception as error:  # noqa: BLE001 - it may be back before the lease ends
            log.warning(
                "the lease on message %s cannot be renewed for now; should it run out, another "
                "worker of %s may take the message over: %s",
                lease.wanted.id, lease.consumer, told(error),
            )  # fmt: skip
            return False
        with self._lock:
            is_wanted = lease in self._kept  # else it was given back meanwhile, by ourselves
        if not still and is_wanted:
            log.warning("the lease on message %s is lost to another worker of %s, this one's "
                        "result will be refused", lease.wanted.id, lease.consumer)  # fmt: skip
            self.drop(lease)
        return True


_LEASE = LeaseColumns(until=leases.c.until, epoch=leases.c.token, rows_return=True)
# Made once: these run for every message.
_ROW = and_(leases.c.consumer == bindparam("of"), leases.c.message == bindparam("what"))
_OWN = and_(_ROW, _LEASE.is_held_by(epoch=bindparam("epoch")))
_LOOK = (
    select(leases.c.token, (leases.c.until - database_now()).label("remaining"))
    .where(_ROW)
    .with_for_update()
)
_TAKE = update(leases).where(_ROW).values(_LEASE.taken(seconds=bindparam("seconds")))
_RENEW = (
    update(leases)
    .where(_OWN, leases.c.until > 0)  # a heartbeat on its way would lock out the next attempt
    .values(_LEASE.renewed(seconds=bindparam("seconds")))
)
_END = delete(leases).where(_OWN)
_FREE = update(leases).where(_OWN).values(_LEASE.released())


class DatabaseLeases(LeaseMemory):
    """A `LeaseStore` in the tables of the inbox; expiry is by the database's clock.

    A lease is taken in a transaction of its own, before the handler runs. Its end may join
    the handler's transaction: then what the handler wrote commits only if the lease is
    still ours.
    """

    def __init__(
        self, engine: Engine, *, inbox: Inbox | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._inbox = Inbox() if inbox is None else inbox
        self._clock = clock
        self._sql = statements("holdfast.idempotency", engine.dialect.name)

    @property
    def window(self) -> float | None:
        """How long a handled message is remembered, in seconds; None for ever."""
        return self._inbox.window

    def with_window(self, window: Duration | None) -> Self:
        """Return the same store that remembers handled messages for *window*."""
        other = copy.copy(self)
        other._inbox = Inbox(window=window)
        return other

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""
        self._inbox.succeed(consumer, formerly)

    def take(self, consumer: str, wanted: ClaimRequest, seconds: float) -> Lease | Handled:
        """Take the message unless it is handled or another's lease lasts."""
        key = {"of": consumer_key(consumer), "what": wanted.key}

        def work(db: Connection) -> Lease | Handled:
            former = self._inbox.enter(db, consumer)
            row = self._locked(db, key)
            # Looked for under the lock: who completes deletes the lease in the same breath.
            before = known(db, consumer, wanted)
            if before is None and former:
                before = known_formerly(db, consumer, former, wanted)
            if before is not None:
                db.execute(_END, {**key, "epoch": row.token})
                if before.conflict is not None:
                    raise before.conflict
                return Handled(result=before.result)
            remaining = max([float(row.remaining), *self._leased_formerly(db, former, wanted)])
            if remaining > 0:
                raise InProgress(consumer, wanted.id, remaining)
            db.execute(_TAKE, {**key, "seconds": seconds})
            token = db.execute(_LOOK, key).one().token
            return Lease(consumer=consumer, wanted=wanted, token=token, seconds=seconds)

        return transact(self._engine, work, clock=self._clock)

    def _leased_formerly(
        self, db: Connection, former: Sequence[FormerScope], wanted: ClaimRequest
    ) -> list[float]:
        """Return how long processes of an earlier version hold the message, each if it does."""
        found = []
        for one in former:
            if one.is_written:
                key = {"of": one.number, "what": bare_key(wanted)}
                row = db.execute(_LOOK, key).one_or_none()
                found += [] if row is None else [float(row.remaining)]
        return found

    def _locked(self, db: Connection, key: dict[str, Any]) -> Any:
        """Return the row of the lease, made if it is missing, locked until the commit."""
        while (row := db.execute(_LOOK, key).one_or_none()) is None:
            # A rival that completes may delete the row again before we have locked it.
            db.execute(self._sql["lease_seed"], key)
        return row

    def renew(self, lease: Lease) -> bool:
        """Make *lease* last from now; False if another has taken over."""
        values = {**_key(lease), "seconds": lease.seconds}
        done = transact(self._engine, lambda db: db.execute(_RENEW, values).rowcount)
        return bool(done == 1)

    def complete(
        self,
        lease: Lease,
        result: bytes | None,
        *,
        connection: Connection | Session | None = None,
    ) -> None:
        """Remember the message as handled, in the transaction of *connection* if there is one."""

        def work(db: Any) -> None:
            if db.execute(_END, _key(lease)).rowcount != 1:
                raise LeaseLost(lease.consumer, lease.wanted.id)
            answers = claim(db, lease.consumer, [lease.wanted])
            if former := self._inbox.enter(db, lease.consumer):
                carried(db, lease.consumer, former, [lease.wanted], answers)
            if result is not None:
                keep_result(db, lease.consumer, lease.wanted.key, result)

        if connection is None:
            transact(self._engine, work, clock=self._clock)
        else:
            work(connection)

    def free(self, lease: Lease) -> None:
        """Let the next attempt begin at once; the token is kept, so it goes on growing."""
        transact(self._engine, lambda db: db.execute(_FREE, _key(lease)))


def _key(lease: Lease) -> dict[str, Any]:
    number = consumer_key(lease.consumer)
    return {"of": number, "what": lease.wanted.key, "epoch": lease.token}
