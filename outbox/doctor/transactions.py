"""Long-running transactions: they keep vacuum from cleaning and slots from moving on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.doctor.finding import Finding, Severity, duration
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_SHOWN, _QUERY = 5, 200


def long_running(patient: Patient) -> Iterator[Finding]:
    """Name the transactions that hold back what is cleaned up, oldest first."""
    limits = patient.limits.transaction_seconds
    with patient.connected() as db:
        most = {"least": limits[0], "most": _SHOWN}
        running = db.execute(patient.sql["holders"], most).all()
        prepared = db.execute(patient.sql["prepared"], most).all()
    for row in running:
        query = mask(" ".join((row.query or "").split()))[:_QUERY]
        yield Finding(
            check="transactions",
            severity=Severity.of(float(row.age), *limits),
            text=f"pid {row.pid} ({row.usename}, {row.application_name or 'unnamed'}, {row.state}) "
            f"has had a transaction open for {duration(float(row.age))}; its last query: {query}",
            fix=f"end it in its program, or run  SELECT pg_terminate_backend({row.pid});  set "
            "idle_in_transaction_session_timeout against the next one",
            facts={"pid": row.pid, "age_seconds": float(row.age), "state": row.state,
                   "query": query, "holds_xmin": bool(row.holds_xmin)},
        )  # fmt: skip
    for row in prepared:
        yield Finding(
            check="transactions",
            severity=Severity.of(float(row.age), *limits),
            text=f"prepared transaction {row.gid!r} has been open for {duration(float(row.age))}",
            fix=f"run  COMMIT PREPARED '{row.gid}'  or  ROLLBACK PREPARED '{row.gid}'",
            facts={"gid": row.gid, "age_seconds": float(row.age)},
        )
    if not running and not prepared:
        yield Finding(check="transactions", severity=Severity.OK,
                      text=f"none is older than {duration(limits[0])}")  # fmt: skip
