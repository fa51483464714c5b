"""What the doctor looks at among sagas: those that run, are overdue or parked, and their timers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.findings import Finding, Look, Severity, counted, duration
from holdfast.sagas.operations import SagaOperations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

_TIMERS = 60.0, 600.0  # seconds by which a timer may be late


def looks(engine: Engine) -> list[Look]:
    """Return what there is to look at; the tables of sagas must be there."""
    return [Look("sagas", lambda: sagas(engine))]


def sagas(engine: Engine) -> Iterator[Finding]:
    """Judge what has not ended: parked, overdue, or with nobody to go on."""
    found = SagaOperations(engine).backlog()
    by_status: Counter[str] = Counter()
    for (_, status), number in found.active.items():
        by_status[status] += number
    facts = {
        "active": dict(by_status), "overdue": found.overdue,
        "timer_lag_seconds": round(found.timer_lag_seconds, 3),
    }  # fmt: skip
    told = ", ".join(f"{number:,} {status}" for status, number in sorted(by_status.items()))
    yield Finding(check="sagas", severity=Severity.OK, text=told or "none runs", facts=facts)
    if by_status["parked"]:
        yield Finding(
            check="sagas",
            severity=Severity.WARNING,
            text=f"{counted(by_status['parked'], 'saga', 'sagas')} parked: a step failed for good, "
            "and a person decides",
            fix="run  holdfast saga list --status parked,  then show, and retry, skip or mark-done",
            facts={"parked": by_status["parked"]},
        )
    if found.overdue:
        yield Finding(
            check="sagas",
            severity=Severity.WARNING,
            text=f"{counted(found.overdue, 'saga', 'sagas')} beyond the deadline and not ended",
            fix="run  holdfast saga list --overdue",
            facts={"overdue": found.overdue},
        )
    severity = Severity.of(found.timer_lag_seconds, *_TIMERS)
    if severity:
        yield Finding(
            check="sagas",
            severity=severity,
            text=f"timers are {duration(found.timer_lag_seconds)} late: nobody runs the sagas",
            fix="start  holdfast saga run MODULE:SAGAS,  or see why it hangs in its log",
            facts={"timer_lag_seconds": round(found.timer_lag_seconds, 3)},
        )
