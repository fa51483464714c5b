"""Dead rows of the hot table, and whether vacuum is set up to clear them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.doctor.finding import Finding, Severity, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_SETTINGS = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000"


def dead_rows(patient: Patient) -> Iterator[Finding]:
    """Judge the dead rows of the outbox and its vacuum settings."""
    with patient.connected() as db:
        table = db.execute(patient.sql["bloat"]).one()
    dead = float(table.dead or 0)
    severity = Severity.of(dead, *patient.limits.dead_rows)
    ago = None if table.vacuumed is None else float(table.vacuumed)
    last = "never" if ago is None else f"{duration(ago)} ago"
    yield Finding(
        check="vacuum",
        severity=severity,
        text=f"{dead:,.0f} dead rows in {size(table.bytes)}, last vacuumed {last}",
        fix="end the long-running transaction that is named above if there is one, then run  "
        "VACUUM holdfast_outbox" if severity else None,
        facts={"dead": int(dead), "bytes": table.bytes, "vacuumed_seconds_ago": ago},
    )  # fmt: skip
    if table.autovacuum != "on":
        yield Finding(
            check="vacuum",
            severity=Severity.CRITICAL,
            text="autovacuum is off: the outbox grows although its rows are deleted",
            fix="run  ALTER SYSTEM SET autovacuum = on  and  SELECT pg_reload_conf()",
        )
    if not any("scale_factor=0" in option for option in table.options or ()):
        yield Finding(
            check="vacuum",
            severity=Severity.WARNING,
            text="the outbox waits for a share of its rows to be dead before it is vacuumed",
            fix=f"run  ALTER TABLE holdfast_outbox SET ({_SETTINGS})",
        )
