"""What the doctor's checks work with: the database they look at, limits, and privileges."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.db.sql import statements
from holdfast.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From when on something is worth a word; pairs are warning and critical."""

    oldest_seconds: tuple[float, float] = (60.0, 600.0)
    backlog: tuple[float, float] = (100_000, 10_000_000)
    overdue_seconds: tuple[float, float] = (30.0, 600.0)
    transaction_seconds: tuple[float, float] = (60.0, 3600.0)
    retained_bytes: tuple[float, float] = (256e6, 4e9)
    runway_minutes: tuple[float, float] = (240.0, 30.0)
    """Counted downwards: less is worse."""
    xmin_age: tuple[float, float] = (1_000_000, 100_000_000)
    """Transactions for which a slot keeps vacuum from clearing what they deleted."""
    dead_rows: tuple[float, float] = (100_000, 5_000_000)
    skew_seconds: tuple[float, float] = (2.0, 60.0)
    rate_seconds: float = 1.0
    """How long the growth of the log is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorContext:
    """One outbox, and by which limits it is judged."""

    engine: Engine
    limits: Limits
    slot: str
    publication: str
    clock: Clock

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """Yield a connection without a transaction, so that looking never pins anything."""
        options = {"isolation_level": "AUTOCOMMIT"}
        with self.engine.connect().execution_options(**options) as db:
            yield db

    def now(self, db: Connection) -> float:
        """Return the database's time in POSIX seconds."""
        own = statements("holdfast.outbox", self.engine.dialect.name)
        return float(db.execute(own["now"]).scalar_one())

    @property
    def sql(self) -> dict[str, TextClause]:
        """The questions that only PostgreSQL answers."""
        return statements("holdfast.outbox.doctor", "postgresql")


_NEEDED = {
    "holdfast_outbox": "SELECT, INSERT, DELETE",
    "holdfast_outbox_delayed": "SELECT, INSERT, DELETE",
    "holdfast_outbox_shard": "SELECT, INSERT, UPDATE",
    "holdfast_outbox_relay": "SELECT, INSERT, UPDATE, DELETE",
    "holdfast_outbox_parked": "SELECT, INSERT, UPDATE, DELETE",
    "holdfast_audit": "SELECT, INSERT",
    "holdfast_audit_head": "SELECT, INSERT, UPDATE",
}


def privileges(patient: DoctorContext) -> Iterator[Finding]:
    """Judge whether this role may do what a relay and an operator do."""
    if patient.engine.dialect.name != "postgresql":
        return  # the others tell only by trying
    lacking = False
    for table, needed, on, role in _lacking(patient):
        lacking = True
        yield Finding(
            check="privileges",
            severity=Severity.CRITICAL,
            text=f"role {role} lacks some of {needed} on {on}",
            fix=f"run  GRANT {needed} ON {on} TO {role}",
            facts={"table": table, "role": role},
        )
    if not lacking:
        yield Finding(check="privileges", severity=Severity.OK, text="this role may do all it must")


def _lacking(patient: DoctorContext) -> Iterator[tuple[str, str, str, str]]:
    """Yield the table, what is needed, on what, and the role that lacks it."""
    with patient.connected() as db:
        for table, needed in _NEEDED.items():
            asked = {"table": table, "needed": needed}
            all_of_them, role = db.execute(patient.sql["privileges"], asked).one()
            if not all_of_them:
                yield table, needed, table, role
            # Without its sequence no row can be inserted; an identity column needs no grant.
            for sequence, usable in db.execute(patient.sql["sequence"], {"table": table}):
                if not usable:
                    yield table, "USAGE", f"SEQUENCE {sequence}", role
