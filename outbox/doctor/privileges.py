"""What the role of a relay must be allowed to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.doctor.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_NEEDED = {
    "holdfast_outbox": "SELECT, INSERT, DELETE",
    "holdfast_outbox_delayed": "SELECT, INSERT, DELETE",
    "holdfast_outbox_shard": "SELECT, INSERT, UPDATE",
    "holdfast_outbox_relay": "SELECT, INSERT, UPDATE, DELETE",
    "holdfast_outbox_parked": "SELECT, INSERT, UPDATE, DELETE",
    "holdfast_audit": "SELECT, INSERT",
    "holdfast_audit_head": "SELECT, INSERT, UPDATE",
}


def privileges(patient: Patient) -> Iterator[Finding]:
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


def _lacking(patient: Patient) -> Iterator[tuple[str, str, str, str]]:
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
