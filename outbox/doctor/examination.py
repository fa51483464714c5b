"""The examination: every check in turn, none of them able to spoil the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.outbox.doctor import bloat, privileges, queue, relays, slots, transactions
from holdfast.outbox.doctor.finding import Finding, Limits, Severity
from holdfast.outbox.doctor.patient import Patient
from holdfast.outbox.slot_name import default_slot
from holdfast.outbox.tables import missing_tables
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    Check = Callable[[Patient], Iterator[Finding]]

_ANYWHERE: tuple[Check, ...] = (
    queue.clock_skew,
    privileges.privileges,
    queue.waiting,
    queue.shards,
    queue.delayed,
    queue.parked_keys,
    relays.alive,
    relays.leases,
)
_POSTGRES: tuple[Check, ...] = (
    slots.slots,
    slots.publication,
    transactions.long_running,
    bloat.dead_rows,
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
        self._patient = Patient(
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
                missing = missing_tables(db)
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
        checks = _ANYWHERE + (_POSTGRES if engine.dialect.name == "postgresql" else ())
        return [finding for check in checks for finding in self._findings(check)]

    def _findings(self, check: Check) -> list[Finding]:
        try:
            return list(check(self._patient))
        except DBAPIError as error:
            name = check.__name__.replace("_", " ")
            return [
                Finding(
                    check=name,
                    severity=Severity.WARNING,
                    text=f"could not be looked at: {_words(error)}",
                    fix="use a role that may read it, e.g. one that is granted pg_monitor",
                )
            ]


def _down(error: OperationalError) -> Finding:
    return Finding(
        check="database",
        severity=Severity.CRITICAL,
        text=f"the database does not answer: {_words(error)}",
        fix="start it, or correct --database",
    )


def _words(error: DBAPIError) -> str:
    return " ".join(mask(str(error.orig)).split())
