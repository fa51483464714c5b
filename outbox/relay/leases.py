"""Shard leases: which relay may publish what, fenced by epochs, timed by the database."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, Transient
from holdfast.ids import new_id
from holdfast.outbox.schema import SHARDS, relay, require_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy.engine import Connection, Engine

log = logging.getLogger("holdfast.outbox")

_REMEMBERED = 86_400.0
"""Seconds for which relays that died are kept for the doctor to name."""
_TIDYING = 3600.0
"""Seconds between two looks for relays that died longer ago than that."""
SHORTEST, LONGEST = 0.01, 86_400.0
"""Seconds: below, no database could renew it in time; above, nobody would replace a dead relay."""
_SPARE = 0.1
"""The share of a lease that is left unused: time for a client to let go of a batch."""


class ShardLeaseLost(Transient):
    """The leases ran out: nothing was deleted, and the rows are published again."""

    def __init__(self) -> None:
        super().__init__("the relay's leases ran out; another relay may own the shards now")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How long a lease lasts, and who asks for it."""

    seconds: float = 10.0
    """A relay that died is replaced within this time; renewed at a third of it."""
    engine: str = "lease"
    exclusive: bool = False
    """Take every shard or none, as the WAL engine must."""

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int | float) or not SHORTEST <= self.seconds <= LONGEST:
            raise ConfigurationError(
                f"lease of {self.seconds} seconds: use {SHORTEST:g} to {LONGEST:g}, e.g. 10"
            )


class Leases:
    """The shards this relay owns now.

    Several relays share the shards evenly; one that dies loses its own when they expire.
    Every deletion is guarded by `holds`: a relay whose lease ran out deletes nothing.
    """

    def __init__(
        self, engine: Engine, terms: LeaseTerms | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.me = new_id()
        self.terms = LeaseTerms() if terms is None else terms
        self.owned: Mapping[int, int] = {}
        """Shard → epoch."""
        self._engine = engine
        self._sql = statements("holdfast.outbox", engine.dialect.name)
        self._clock = clock
        self._renewed = float("-inf")
        self._seeded = False
        self._tidied = float("-inf")

    @property
    def remaining(self) -> float:
        """Seconds that the leases surely last, counted from before they were asked for."""
        return self._renewed + self.terms.seconds - self._clock.monotonic()

    @property
    def publishable(self) -> float:
        """Seconds within which a publish must have ended; none are left at 0 or below.

        A relay that was frozen, or cut off from its database, does not know that another
        one took over. It stops by its own clock, before the lease can be anybody else's.
        """
        return self.remaining - self.terms.seconds * _SPARE

    @property
    def due(self) -> bool:
        """Whether it is time to renew."""
        return self.remaining < self.terms.seconds * 2 / 3

    def renew(self) -> None:
        """Stay alive, give up what exceeds our share, take what is free; one transaction.

        Call it with nothing in flight: shards may change hands here.
        """
        asked = self._clock.monotonic()
        self.owned = transact(self._engine, self._renewed_shards, clock=self._clock)
        self._seeded = True
        self._renewed = asked
        if asked - self._tidied >= _TIDYING:
            transact(self._engine, self._forget, clock=self._clock)
            self._tidied = asked

    def extend(self) -> bool:
        """Make the leases last as long as if renewed; False if `renew` is to share shards anew.

        No shard changes hands, so it may be called with batches in flight. Publishing goes on
        meanwhile; nothing more is read until it is known that every shard is still ours.
        """
        asked, owned = self._clock.monotonic(), self.owned
        if not owned or "extend" not in self._sql:
            return False

        def extend(db: Connection) -> bool:
            if self._quota(db) != len(owned):
                return False
            who = {"me": self.me, "ttl": self.terms.seconds, "shards": self.listed(owned)}
            return len(db.execute(self._sql["extend"], who).all()) == len(owned)

        if not transact(self._engine, extend, clock=self._clock):
            return False
        self._renewed = asked
        return True

    def _renewed_shards(self, db: Connection) -> Mapping[int, int]:
        if not self._seeded:
            require_tables(db)
            db.execute(self._sql["seed"], {"last": SHARDS - 1})
        return self._share(db)

    def _forget(self, db: Connection) -> None:
        """Delete the relays that died long ago; apart, so that the shards wait for nobody."""
        now = float(db.execute(self._sql["now"]).scalar_one())
        db.execute(delete(relay).where(relay.c.until < now - _REMEMBERED))

    def _share(self, db: Connection) -> Mapping[int, int]:
        terms, me = self.terms, {"me": self.me}
        quota = self._quota(db)
        free = db.execute(self._sql["claim"], {**me, "quota": quota}).scalars().all()
        if terms.exclusive and len(free) < SHARDS:
            free = []  # all or nothing: somebody else is at work
        listed = self.listed(free)
        db.execute(self._sql["free"], {**me, "shards": listed})
        db.execute(self._sql["take"], {**me, "ttl": terms.seconds, "shards": listed})
        return self._valid(db, free)

    def _quota(self, db: Connection) -> int:
        """Say that this relay is alive; return how many shards are its share."""
        terms = self.terms
        who = {"ttl": terms.seconds, "engine": terms.engine, "host": socket.gethostname()}
        db.execute(self._sql["greet"], {"me": self.me, **who})
        peers = db.execute(self._sql["peers"], {"engine": terms.engine}).scalar_one()
        return SHARDS if terms.exclusive else -(-SHARDS // max(peers, 1))

    def holds(self, db: Connection) -> bool:
        """Whether every shard is still ours under its epoch, and stays so until *db* commits.

        Not without a shard: a thread may ask just after the leases were dropped.
        """
        owned = self.owned
        return bool(owned) and self._valid(db, owned) == owned

    def verify(self) -> None:
        """Return if the database says that every shard is still ours; else `LeaseLost`."""
        if not transact(self._engine, self.holds, clock=self._clock):
            raise ShardLeaseLost

    def _valid(self, db: Connection, shards: Iterable[int]) -> Mapping[int, int]:
        guard = {"me": self.me, "shards": self.listed(shards)}
        # The driver's own rows: SQLAlchemy's would cost as much as the statement.
        cursor: Any = db.execute(self._sql["guard"], guard).cursor
        return dict(cursor.fetchall())

    def drop(self) -> None:
        """Forget the shards after they were lost; the next `renew` starts afresh."""
        log.warning("relay %s lost its leases; publishing stops until they are renewed", self.me)
        self.owned = {}
        self._renewed = float("-inf")

    def release(self) -> None:
        """Give everything back at once, so that another relay need not wait."""
        if not self._seeded:
            return  # nothing was ever taken, and the tables may not be there
        transact(self._engine, self._leave, clock=self._clock)
        self.owned = {}

    def _leave(self, db: Connection) -> None:
        db.execute(self._sql["free"], {"me": self.me, "shards": self.listed([])})
        db.execute(self._sql["bury"], {"me": self.me})

    def listed(self, numbers: Iterable[int]) -> str:
        """Return *numbers* as the one text parameter that the statements take apart."""
        text = ",".join(map(str, numbers))
        return f"{{{text}}}" if self._engine.dialect.name == "postgresql" else text
