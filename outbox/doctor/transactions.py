"""Long-running transactions: they keep vacuum from cleaning and slots from moving on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.outbox.doctor.finding import Finding, Severity, duration
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Row

    from holdfast.outbox.doctor.patient import Patient

_SHOWN, _QUERY = 5, 200


def long_running(patient: Patient) -> Iterator[Finding]:
    """Name the transactions that hold back what is cleaned up, oldest first."""
    limits = patient.limits.transaction_seconds
    with patient.connected() as db:
        most = {"least": limits[0], "most": _SHOWN}
        running = db.execute(patient.sql["holders"], most).all()
        prepared = db.execute(patient.sql["prepared"], most).all()
        hidden = db.execute(patient.sql["hidden"]).all()
    if hidden:
        yield _unseen(hidden)
    for row in running:
        query = mask(" ".join((row.query or "").split()))[:_QUERY]
        held = " and holds xmin: vacuum clears nothing deleted since" if row.holds_xmin else ""
        yield Finding(
            check="transactions",
            severity=Severity.of(float(row.age), *limits),
            text=f"pid {row.pid} ({row.usename}, {row.application_name or 'unnamed'}, {row.state}) "
            f"has had a transaction open for {duration(float(row.age))}{held}; its last query: "
            f"{query}",
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
    if not running and not prepared and not hidden:
        yield Finding(check="transactions", severity=Severity.OK,
                      text=f"none is older than {duration(limits[0])}")  # fmt: skip


def _unseen(hidden: Sequence[Row[Any]]) -> Finding:
    pids = ", ".join(f"{row.pid} ({row.usename})" for row in hidden[:_SHOWN])
    return Finding(
        check="transactions",
        severity=Severity.WARNING,
        text=f"{len(hidden)} of other roles are open, and this role may not see since when: "
        f"pid {pids}",
        fix=f"run  GRANT pg_monitor TO {hidden[0].role}  and look again",
        facts={"hidden": [row.pid for row in hidden]},
    )
