"""Dead rows of the hot table, and whether vacuum is set up to clear them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.doctor.finding import Finding, Severity, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_OFF = {"false", "off", "no", "0", "f", "n"}
"""How PostgreSQL keeps a table's option that is not true."""
_SETTINGS = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000"


def dead_rows(patient: Patient) -> Iterator[Finding]:
    """Judge the dead rows of the outbox and its vacuum settings."""
    with patient.connected() as db:
        table = db.execute(patient.sql["bloat"]).one()
        holder = db.execute(patient.sql["horizon"]).first()
    dead = float(table.dead or 0)
    severity = Severity.of(dead, *patient.limits.dead_rows)
    ago = None if table.vacuumed is None else float(table.vacuumed)
    last = "never" if ago is None else f"{duration(ago)} ago"
    text = f"{dead:,.0f} dead rows in {size(table.bytes)}, last vacuumed {last}"
    fix = "run  VACUUM holdfast_outbox"
    if severity and holder is not None:
        text += f"; the oldest xmin is held by {holder.holder}, {holder.age:,} transactions back"
        fix = f"if {holder.holder} stays in the way, end or drop it as told above, then {fix}"
    yield Finding(
        check="vacuum",
        severity=severity,
        text=text,
        fix=fix if severity else None,
        facts={
            "dead": int(dead), "bytes": table.bytes, "vacuumed_seconds_ago": ago,
            "xmin_held_by": None if holder is None else holder.holder,
        },
    )  # fmt: skip
    options = dict(option.split("=", 1) for option in table.options or ())
    if table.autovacuum != "on":
        yield Finding(
            check="vacuum",
            severity=Severity.CRITICAL,
            text="autovacuum is off: the outbox grows although its rows are deleted",
            fix="run  ALTER SYSTEM SET autovacuum = on  and  SELECT pg_reload_conf()",
        )
    elif options.get("autovacuum_enabled", "true").lower() in _OFF:
        yield Finding(
            check="vacuum",
            severity=Severity.CRITICAL,
            text="autovacuum is off for the outbox: it grows although its rows are deleted",
            fix="run  ALTER TABLE holdfast_outbox RESET (autovacuum_enabled)",
        )
    if float(options.get("autovacuum_vacuum_scale_factor", "nan")) != 0:
        yield Finding(
            check="vacuum",
            severity=Severity.WARNING,
            text="the outbox waits for a share of its rows to be dead before it is vacuumed",
            fix=f"run  ALTER TABLE holdfast_outbox SET ({_SETTINGS})",
        )
