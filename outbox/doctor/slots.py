"""Replication slots: what they pin, and how long that can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.findings import Finding, Severity, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Row

    from holdfast.outbox.doctor.context import DoctorContext

_BROKEN = {
    "lost": "the server has thrown away what the slot needs",
    "unreserved": "the server throws away what the slot needs at the next checkpoint",
}


def slots(patient: DoctorContext) -> Iterator[Finding]:
    """Judge every slot of the server, since each of them can fill its disk."""
    with patient.connected() as db:
        found = db.execute(patient.sql["slots"]).all()
        settings = db.execute(patient.sql["settings"]).one()
        rate = 0.0
        if found:
            start = db.execute(patient.sql["log_end"]).scalar_one()
            patient.clock.sleep(patient.limits.rate_seconds)
            grown = db.execute(patient.sql["grown"], {"start": start}).scalar_one()
            rate = float(grown) / patient.limits.rate_seconds
    if not found:
        level = settings.wal_level
        text = "there is no replication slot"
        if level != "logical":
            text += f"; wal_level is {level}, and --engine wal would need logical"
        yield Finding(check="slots", severity=Severity.OK, text=text, facts={"wal_level": level})
        return
    if settings.wal_level != "logical":
        yield Finding(
            check="slots",
            severity=Severity.CRITICAL,
            text=f"wal_level is {settings.wal_level}: no slot can be read",
            fix="run  ALTER SYSTEM SET wal_level = logical  and restart PostgreSQL",
        )
    if settings.keep == "-1":
        yield Finding(
            check="slots",
            severity=Severity.WARNING,
            text="max_slot_wal_keep_size is unlimited: a slot that nobody reads fills the disk",
            fix="run  ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'  and  SELECT "
            "pg_reload_conf();  when a slot is lost the WAL engine reads the table instead",
        )
    for slot in found:
        yield _judged(patient, slot, rate)


def _judged(patient: DoctorContext, slot: Row[Any], rate: float) -> Finding:
    limits, retained = patient.limits, float(slot.retained or 0)
    safe = None if slot.safe_wal_size is None else float(slot.safe_wal_size)
    minutes = None if safe is None or rate <= 0 else max(0.0, safe) / rate / 60
    severity = Severity.of(retained, *limits.retained_bytes)
    if minutes is not None:
        warning, critical = limits.runway_minutes
        severity = max(severity, Severity.of(-minutes, -warning, -critical))
    ages = {"xmin": slot.xmin_age, "catalog_xmin": slot.catalog_xmin_age}
    held = {kind: int(age) for kind, age in ages.items() if age is not None}
    severity = max(severity, Severity.of(max(held.values(), default=0), *limits.xmin_age))
    if slot.wal_status in _BROKEN:
        severity = Severity.CRITICAL
    if slot.wal_status == "extended":
        severity = max(severity, Severity.WARNING)
    reader = f"read by pid {slot.active_pid}" if slot.active else "read by nobody"
    text = f"slot {slot.slot_name} ({reader}) keeps {size(retained)} of log"
    if slot.wal_status in _BROKEN:
        text += f"; {_BROKEN[slot.wal_status]}"
    if minutes is not None:
        text += f"; {duration(minutes * 60)} left at {size(rate)}/s"
    for kind, age in held.items():
        text += f"; holds {kind} {age:,} transactions back"
    return Finding(
        check="slots",
        severity=severity,
        text=text,
        fix=_fix(patient, slot) if severity else None,
        facts={
            "slot": slot.slot_name, "active": slot.active, "retained_bytes": int(retained),
            "wal_status": slot.wal_status, "safe_wal_size": None if safe is None else int(safe),
            "bytes_per_second": round(rate), "runway_minutes": minutes,
            "xmin_age": held.get("xmin"), "catalog_xmin_age": held.get("catalog_xmin"),
        },
    )  # fmt: skip


def _fix(patient: DoctorContext, slot: Row[Any]) -> str:
    drop = f"SELECT pg_drop_replication_slot('{slot.slot_name}')"
    if slot.slot_name == patient.slot and slot.wal_status != "lost":
        return f"start  holdfast relay --engine wal,  or give the slot up:  {drop}"
    if slot.slot_name == patient.slot:
        return "start  holdfast relay --engine wal: it makes a new slot and reads the table"
    if slot.active:
        return f"see why its reader (pid {slot.active_pid}) is slow"
    return f"start its reader, or if nobody needs it any more:  {drop}"


def publication(patient: DoctorContext) -> Iterator[Finding]:
    """Judge whether the slot's publication holds the outbox; without a slot it need not."""
    with patient.connected() as db:
        names = {"slot": patient.slot, "name": patient.publication, "table": "holdfast_outbox"}
        found = db.execute(patient.sql["publication"], names).one()
    if not found.has_slot:
        return
    name = patient.publication
    if not found.is_there:
        yield Finding(
            check="publication",
            severity=Severity.CRITICAL,
            text=f"slot {patient.slot} is there but publication {name} is not",
            fix=f"run  CREATE PUBLICATION {name} FOR TABLE holdfast_outbox "
            "WITH (publish = 'insert')",
        )
    elif not found.has_table:
        yield Finding(
            check="publication",
            severity=Severity.CRITICAL,
            text=f"publication {name} lacks the table holdfast_outbox: its events are not streamed",
            fix=f"run  ALTER PUBLICATION {name} ADD TABLE holdfast_outbox",
        )
    else:
        yield Finding(check="publication", severity=Severity.OK, text=f"{name} holds the outbox")
