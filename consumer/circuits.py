"""Circuits shared by processes through the database: one finds out, all pause, one probes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.circuit import Sharing, Word
from holdfast.consumer.schema import circuit, database_now
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.consumer.route import Route


class SqlSharedState:
    """A `SharedState` in the table `holdfast_circuit`; the database's clock counts."""

    def __init__(self, engine: Engine, *, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def read(self, name: str) -> Word | None:
        """Return the last word about *name*; a new one is entered, for operators to see."""
        with self._engine.connect() as db:
            word = _word(db, name)
        if word is None:
            transact(self._engine, lambda db: _enter(db, name), clock=self._clock)
        return word

    def say_open(self, name: str, seconds: float) -> Word:
        """Declare *name* open for *seconds*."""
        return self._say(name, is_open=1, until=database_now() + seconds)

    def say_closed(self, name: str) -> Word:
        """Declare *name* closed."""
        return self._say(name, is_open=0, until=0.0)

    def claim_probe(self, name: str, seconds: float) -> bool:
        """Give the probe to one caller; it comes back if nothing is said for *seconds*."""
        claim = (
            update(circuit)
            .where(
                circuit.c.name == name, circuit.c.is_open == 1, circuit.c.until <= database_now()
            )
            .values(version=circuit.c.version + 1, until=database_now() + seconds)
        )
        return transact(self._engine, lambda db: db.execute(claim).rowcount == 1, clock=self._clock)

    def _say(self, name: str, *, is_open: int, until: Any) -> Word:
        def write(db: Connection) -> Word:
            values = {"is_open": is_open, "until": until}
            change = update(circuit).where(circuit.c.name == name)
            raised = change.values(version=circuit.c.version + 1, **values)
            if db.execute(raised).rowcount == 0:
                _enter(db, name)
                db.execute(raised)
            word = _word(db, name)
            if word is None:
                raise LookupError(name)
            return word

        return transact(self._engine, write, clock=self._clock)


def shared(routes: Iterable[Route], engine: Engine, clock: Clock) -> list[Sharing]:
    """Tie every dependency's breaker of *routes* to the database."""
    state = SqlSharedState(engine, clock=clock)
    found = {
        breaker
        for route in routes
        for breaker in route.breakers
        # How many messages die or fail alike is each process's own matter.
        if breaker is not route.limit and breaker is not route.outage.detector.breaker
    }
    return [Sharing(breaker, state) for breaker in found]


def _enter(db: Connection, name: str) -> None:
    try:
        with db.begin_nested():
            db.execute(insert(circuit).values(name=name, version=1, is_open=0, until=0.0))
    except IntegrityError:
        return  # a rival was first to speak of it


def _word(db: Connection, name: str) -> Word | None:
    left = (circuit.c.until - database_now()).label("left")
    wanted = select(circuit.c.version, circuit.c.is_open, left).where(circuit.c.name == name)
    row = db.execute(wanted).first()
    if row is None:
        return None
    seconds = max(0.0, float(row.left)) if row.is_open else 0.0
    return Word(version=row.version, is_open=bool(row.is_open), seconds=seconds)
