"""Circuits shared by processes through the database: one finds out, all pause, one probes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.circuit import SharedVerdict, Sharing
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.schema import circuit
from holdfast.db.audit import KEYS, Audit
from holdfast.db.clock import database_now
from holdfast.db.lease import LeaseColumns
from holdfast.db.transactions import transact
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Engine

    from holdfast.consumer.handlers.route import Route
    from holdfast.db.audit import Operator

_PROBE = LeaseColumns(until=circuit.c.until, epoch=circuit.c.version)
"""Who may try an open circuit: nobody until its time has come, then one, who has the probe for a
while. A lease without an owner: whoever finds out speaks for all, so nobody gives it back."""
_CLOSED: dict[Any, Any] = {"is_open": 0, "until": 0.0, "version": circuit.c.version + 1}


class SqlSharedState:
    """A `SharedState` in the table `holdfast_circuit`; the database's clock counts."""

    def __init__(self, engine: Engine, *, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def read(self, name: str) -> SharedVerdict | None:
        """Return the last word about *name*; a new one is entered, for operators to see."""
        with self._engine.connect() as db:
            word = _word(db, name)
        if word is None:
            transact(self._engine, lambda db: _enter(db, name), clock=self._clock)
        return word

    def say_open(self, name: str, seconds: float) -> SharedVerdict:
        """Declare *name* open for *seconds*."""
        return self._say(name, {"is_open": 1, **_PROBE.taken(seconds=seconds)})

    def say_closed(self, name: str) -> SharedVerdict:
        """Declare *name* closed."""
        return self._say(name, _CLOSED)

    def claim_probe(self, name: str, seconds: float) -> bool:
        """Give the probe to one caller; it comes back if nothing is said for *seconds*."""
        open_one = and_(circuit.c.name == name, circuit.c.is_open == 1)
        return transact(
            self._engine,
            lambda db: _PROBE.take(db, open_one, seconds=seconds),
            clock=self._clock,
        )

    def _say(self, name: str, values: dict[Any, Any]) -> SharedVerdict:
        raised = update(circuit).where(circuit.c.name == name).values(values)

        def write(db: Connection) -> SharedVerdict:
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


def _word(db: Connection, name: str) -> SharedVerdict | None:
    left = (circuit.c.until - database_now()).label("left")
    wanted = select(circuit.c.version, circuit.c.is_open, left).where(circuit.c.name == name)
    row = db.execute(wanted).first()
    if row is None:
        return None
    seconds = max(0.0, float(row.left)) if row.is_open else 0.0
    return SharedVerdict(version=row.version, is_open=bool(row.is_open), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCircuit:
    """One circuit that processes share through the database."""

    name: str
    is_open: bool
    seconds: float
    """How long until it may be tried again."""


class CircuitAdmin:
    """The circuits that processes share, seen and turned by hand; every act is audited."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def circuits(self) -> list[SharedCircuit]:
        """Return the circuits that processes share, by name."""
        left = (circuit.c.until - database_now()).label("left")
        wanted = select(circuit.c.name, circuit.c.is_open, left).order_by(circuit.c.name)
        with self._engine.connect() as db:
            return [
                SharedCircuit(
                    name=row.name,
                    is_open=bool(row.is_open),
                    seconds=max(0.0, float(row.left)) if row.is_open else 0.0,
                )
                for row in db.execute(wanted)
            ]

    def open(self, name: str, seconds: float, operator: Operator) -> None:
        """Hold the shared circuit *name* open for *seconds*, in every process; then it is tried."""
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"{seconds:g} s: a circuit is opened for more than 0 seconds")
        values = {"is_open": 1, **_PROBE.taken(seconds=seconds)}
        self._turn(name, "open", operator, values, {"seconds": seconds})

    def close(self, name: str, operator: Operator) -> None:
        """Close the shared circuit *name* in every process, whatever they found out."""
        self._turn(name, "close", operator, _CLOSED, {})

    def _turn(
        self,
        name: str,
        action: str,
        operator: Operator,
        values: dict[Any, Any],
        detail: dict[str, Any],
    ) -> None:
        turned = update(circuit).where(circuit.c.name == name).values(values)

        def act(db: Connection) -> None:
            if db.execute(turned).rowcount == 0:
                raise NotFound(
                    f"no process shares a circuit {name!r} here: see  holdfast circuits list ; "
                    "circuits are shared by Consumer(…, share_circuits=True)"
                )
            audit = Audit(KEYS, clock=self._clock)
            audit.append(db, operator, f"circuit.{action}", name, detail)

        transact(self._engine, act, clock=self._clock)
