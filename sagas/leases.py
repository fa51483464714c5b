"""Leases of what is due: who works on a timer, by the database's clock, fenced by an epoch."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Text, and_, bindparam, delete, or_, select, update
from sqlalchemy.exc import DBAPIError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.clock import database_now
from holdfast.db.sql import statements
from holdfast.db.transactions import transact
from holdfast.sagas import store
from holdfast.sagas.schema import timer, timer_lease
from holdfast.sagas.states import Direction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

log = logging.getLogger("holdfast.sagas")

_json = msgspec.json.Encoder().encode
_MICROSECONDS = 1_000_000
_BEATS = 3
"""How often a lease is renewed before it would run out."""
_OWN = and_(
    timer.c.saga_id == bindparam("own_saga"), timer.c.step == bindparam("own_step"),
    timer.c.direction == bindparam("own_direction"), timer.c.attempt == bindparam("own_attempt"),
    timer.c.kind == bindparam("own_kind"),
)  # fmt: skip
_TAKE = (
    update(timer)
    .where(_OWN)
    .values(
        owner=bindparam("new_owner"), epoch=bindparam("new_epoch"),
        until=database_now() + bindparam("lease_seconds"),
    )
)  # fmt: skip
_FINISH = delete(timer).where(_OWN, timer.c.epoch == bindparam("own_epoch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimer:
    """A timer that this worker holds."""

    saga_id: str
    step: str
    direction: Direction
    attempt: int
    kind: str
    epoch: int
    tries: int
    type: str
    version: int
    payload: bytes | None = None

    @property
    def key(self) -> Any:
        """Return the condition that finds it."""
        return store.is_timer(
            self.saga_id, self.step, self.direction.value, self.attempt, self.kind
        )

    @property
    def where(self) -> Any:
        """Return the condition under which it is still this worker's."""
        return and_(self.key, timer_lease.is_held_by(epoch=self.epoch))

    @property
    def bound(self) -> dict[str, Any]:
        """Return it as parameters."""
        return {
            "own_saga": self.saga_id, "own_step": self.step,
            "own_direction": self.direction.value, "own_attempt": self.attempt,
            "own_kind": self.kind,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.kind} of {self.step or 'the saga'} of saga {self.saga_id}"


def claim(
    db: Connection,
    versions: frozenset[tuple[str, int]],
    *,
    owner: str,
    seconds: float,
    limit: int,
) -> list[DueTimer]:
    """Lease what is due for *seconds*, of sagas of these *versions*, those due longest first."""
    wanted = _due(versions, limit)
    if db.dialect.name != "sqlite":  # where the transaction has the lock of all writers
        wanted = wanted.with_for_update(skip_locked=True)
    taken = [
        DueTimer(
            saga_id=row.saga_id, step=row.step, direction=Direction(row.direction),
            attempt=row.attempt, kind=row.kind, tries=row.tries, payload=row.payload,
            type=row.type, version=row.version,
            # A timer that is set again has a higher epoch than any before.
            epoch=max(row.epoch + 1, int(float(row.now) * _MICROSECONDS)),
        )
        for row in db.execute(wanted)
    ]  # fmt: skip
    if taken and db.dialect.name == "postgresql":
        db.execute(
            _at_once("take_timers"),
            {"timers": _listed(taken), "owner": owner, "seconds": seconds},
        )
    elif taken:
        lease = {"new_owner": owner, "lease_seconds": seconds}
        db.execute(_TAKE, [{**one.bound, **lease, "new_epoch": one.epoch} for one in taken])
    return taken


@lru_cache(maxsize=16)
def _due(versions: frozenset[tuple[str, int]], limit: int) -> Any:
    mine = or_(
        *(and_(timer.c.type == name, timer.c.version == version) for name, version in versions)
    )
    now = database_now()
    return (
        select(timer, now.label("now"))
        .where(timer.c.due <= now, timer_lease.is_free(), mine)
        .order_by(timer.c.due)
        .limit(limit)
    )


@cache
def _at_once(name: str) -> Any:
    found = statements("holdfast.sagas", "postgresql")[name]
    return found.bindparams(bindparam("timers", type_=Text))


def _listed(due: Sequence[DueTimer]) -> str:
    return _json(
        [
            {
                "saga_id": one.saga_id, "step": one.step, "direction": one.direction.value,
                "attempt": one.attempt, "kind": one.kind, "epoch": one.epoch,
            }
            for one in due
        ]
    ).decode()  # fmt: skip


def still_held(db: Connection, due: Sequence[DueTimer]) -> set[DueTimer]:
    """Return those of *due* that nobody else has taken over by now; nothing is locked."""
    columns = (
        timer.c.saga_id, timer.c.step, timer.c.direction, timer.c.attempt, timer.c.kind,
        timer.c.epoch,
    )  # fmt: skip
    wanted = select(*columns).where(
        store.is_among(db, timer.c.saga_id, {one.saga_id for one in due})
    )
    there = {tuple(row) for row in db.execute(wanted)}
    return {one for one in due if (*one.bound.values(), one.epoch) in there}


def finish(db: Connection, due: Sequence[DueTimer]) -> bool:
    """Remove timers with the work that they stood for; False if one was another worker's."""
    if db.dialect.name == "postgresql":
        removed = db.execute(_at_once("finish_timers"), {"timers": _listed(due)}).rowcount
        return removed == len(due)
    parameters = [{**one.bound, "own_epoch": one.epoch} for one in due]
    return db.execute(_FINISH, parameters).rowcount == len(due)


def give_back(db: Connection, due: Sequence[DueTimer]) -> None:
    """Let others have at once what was not begun."""
    for one in due:
        timer_lease.release(db, one.key, epoch=one.epoch)


class LeaseHeartbeat:
    """Renews the leases of the steps that run now, from a thread of its own.

    So a step that takes longer than its lease is not run by another worker beside it, and that of
    a process that died is taken over. On SQLite there is nothing to renew: who runs a step has the
    lock of all writers, and nobody can take anything over.
    """

    def __init__(self, engine: Engine, *, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: tuple[DueTimer, ...] = ()
        self._thread: threading.Thread | None = None
        self._is_needed = engine.dialect.name != "sqlite"

    @contextmanager
    def keep(self, *due: DueTimer) -> Iterator[None]:
        """Keep the leases of *due* while this is open."""
        if not self._is_needed:
            yield
            return
        with self._lock:
            self._held = due
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._beat, name="holdfast-saga-leases", daemon=True
                )
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._held = ()

    def _beat(self) -> None:
        """Renew until nothing was held for a whole beat: most steps are over long before."""
        never = threading.Event()
        while True:
            self._clock.wait(never, self._seconds / _BEATS)
            with self._lock:
                held = self._held
                if not held:
                    self._thread = None
                    return
            try:
                transact(self._engine, lambda db, held=held: self._renew(db, held))  # type: ignore[misc]
            except DBAPIError as error:
                log.warning("leases of sagas are not renewed: %s", type(error).__name__)

    def _renew(self, db: Connection, held: tuple[DueTimer, ...]) -> None:
        for one in held:
            if not timer_lease.renew(db, one.key, seconds=self._seconds, epoch=one.epoch):
                log.info("%s ended, or another worker has it now", one)
