"""Leases in the database, beside the inbox that remembers what was handled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.idempotency.claim import Wanted, claim, keep_result, known
from holdfast.idempotency.former import Former, Formerly, bare_key, carried, known_formerly
from holdfast.idempotency.inbox import Inbox
from holdfast.idempotency.keys import consumer_key
from holdfast.idempotency.lease import Handled, InProgress, Lease, LeaseLost
from holdfast.sql import statements
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

    from holdfast.idempotency.window import Duration


class DatabaseLeases:
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

    def succeed(self, consumer: str, formerly: Formerly) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""
        self._inbox.succeed(consumer, formerly)

    def take(self, consumer: str, wanted: Wanted, seconds: float) -> Lease | Handled:
        """Take the message unless it is handled or another's lease lasts."""
        key = {"consumer": consumer_key(consumer), "message": wanted.key}

        def work(db: Connection) -> Lease | Handled:
            former = self._inbox.enter(db, consumer)
            row = self._locked(db, key)
            # Looked for under the lock: who completes deletes the lease in the same breath.
            before = known(db, consumer, wanted)
            if before is None and former:
                before = known_formerly(db, consumer, former, wanted)
            if before is not None:
                db.execute(self._sql["lease_end"], {**key, "token": row.token})
                if before.conflict is not None:
                    raise before.conflict
                return Handled(result=before.result)
            remaining = max([float(row.remaining), *self._leased_formerly(db, former, wanted)])
            if remaining > 0:
                raise InProgress(consumer, wanted.id, remaining)
            db.execute(self._sql["lease_take"], {**key, "seconds": seconds})
            token = db.execute(self._sql["lease_look"], key).one().token
            return Lease(consumer=consumer, wanted=wanted, token=token, seconds=seconds)

        return transact(self._engine, work, clock=self._clock)

    def _leased_formerly(
        self, db: Connection, former: Sequence[Former], wanted: Wanted
    ) -> list[float]:
        """Return how long processes of an earlier version hold the message, each if it does."""
        found = []
        for one in former:
            if one.is_written:
                key = {"consumer": one.number, "message": bare_key(wanted)}
                row = db.execute(self._sql["lease_look"], key).one_or_none()
                found += [] if row is None else [float(row.remaining)]
        return found

    def _locked(self, db: Connection, key: dict[str, Any]) -> Any:
        """Return the row of the lease, made if it is missing, locked until the commit."""
        while (row := db.execute(self._sql["lease_look"], key).one_or_none()) is None:
            # A rival that completes may delete the row again before we have locked it.
            db.execute(self._sql["lease_seed"], key)
        return row

    def renew(self, lease: Lease) -> bool:
        """Make *lease* last from now; False if another has taken over."""
        values = {**_key(lease), "seconds": lease.seconds}
        done = transact(
            self._engine, lambda db: db.execute(self._sql["lease_renew"], values).rowcount
        )
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
            if db.execute(self._sql["lease_end"], _key(lease)).rowcount != 1:
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
        transact(self._engine, lambda db: db.execute(self._sql["lease_free"], _key(lease)))


def _key(lease: Lease) -> dict[str, Any]:
    number = consumer_key(lease.consumer)
    return {"consumer": number, "message": lease.wanted.key, "token": lease.token}
