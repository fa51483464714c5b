"""The examination: every check in turn, none of them able to spoil the others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.tables import missing_tables
from holdfast.findings import Finding, Look, Severity
from holdfast.outbox.doctor import checks, context, slots
from holdfast.outbox.doctor.context import DoctorContext, Limits
from holdfast.outbox.relay.monitoring import default_slot
from holdfast.outbox.schema import metadata
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    Check = Callable[[DoctorContext], Iterator[Finding]]

_ANYWHERE: tuple[tuple[str, Check], ...] = (
    ("clock", checks.clock_skew),
    ("privileges", context.privileges),
    ("outbox", checks.waiting),
    ("shards", checks.shards),
    ("delayed", checks.delayed),
    ("parked", checks.parked_keys),
    ("relays", checks.alive),
    ("leases", checks.leases),
)
_POSTGRES: tuple[tuple[str, Check], ...] = (
    ("slots", slots.slots),
    ("publication", slots.publication),
    ("transactions", checks.long_running),
    ("vacuum", checks.dead_rows),
)


class Doctor:
    """Looks at one outbox without changing anything."""

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits | None = None,
        slot: str | None = None,
        publication: str = "holdfast_outbox",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._patient = DoctorContext(
            engine=engine,
            limits=Limits() if limits is None else limits,
            slot=default_slot(engine) if slot is None else slot,
            publication=publication,
            clock=clock,
        )

    def examine(self) -> list[Finding]:
        """Return what was found, in the order of looking; a database that is down is a finding."""
        engine = self._patient.engine
        try:
            with engine.connect() as db:
                missing = missing_tables(db, metadata)
        except OperationalError as error:
            return [_down(error)]
        if missing:
            return [
                Finding(
                    check="tables",
                    severity=Severity.CRITICAL,
                    text=f"tables are missing: {', '.join(missing)}",
                    fix="run  holdfast db upgrade",
                    facts={"missing": missing},
                )
            ]
        return [finding for look in self.looks() for finding in self._findings(look)]

    def looks(self) -> list[Look]:
        """Return what there is to look at; every table of the outbox must be there."""
        found = _ANYWHERE + (_POSTGRES if self._patient.engine.dialect.name == "postgresql" else ())
        return [Look(name, partial(check, self._patient)) for name, check in found]

    def _findings(self, look: Look) -> list[Finding]:
        try:
            return list(look.run())
        except DBAPIError as error:
            return [
                Finding(
                    check=look.check,
                    severity=Severity.UNSEEN,
                    text=f"could not be looked at: {_words(error)}",
                    fix="use a role that may read it, e.g. one that is granted pg_monitor",
                )
            ]


def _down(error: OperationalError) -> Finding:
    return Finding(
        check="database",
        severity=Severity.DOWN,
        text=f"the database does not answer: {_words(error)}",
        fix="start it, or correct --database",
    )


def _words(error: DBAPIError) -> str:
    return " ".join(mask(str(error.orig)).split())
