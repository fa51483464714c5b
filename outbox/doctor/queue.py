"""What waits: the queue itself, delayed events, parked keys, and whether clocks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.clock import seconds_since_epoch
from holdfast.outbox.backlog import Backlog
from holdfast.outbox.doctor.finding import Finding, Severity, duration
from holdfast.outbox.parked_keys import ParkedKeys
from holdfast.outbox.schema import SHARDS, outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_LOOKED_AT = 1000  # what nobody reads comes to be the first


def waiting(patient: Patient) -> Iterator[Finding]:
    """Judge how many events wait, and how long the first has."""
    standing, limits = Backlog(patient.engine).measure(), patient.limits
    about = "" if standing.is_exact else "about "
    if standing.waiting == 0:
        yield Finding(check="outbox", severity=Severity.OK, text="nothing waits",
                      facts={"backlog": 0, "oldest_seconds": 0.0})  # fmt: skip
        return
    age = standing.oldest_seconds
    severity = Severity.of(standing.waiting, *limits.backlog)
    if age is not None:
        severity = max(severity, Severity.of(age, *limits.oldest_seconds))
    known = "of unknown age" if age is None else f"{duration(age)} old"
    yield Finding(
        check="outbox",
        severity=severity,
        text=f"{about}{standing.waiting:,} events wait, the first is {known}",
        fix="look at the findings on relays, slots and transactions, and at the relay's log; if "
        "it publishes all the time, start another one",
        facts={"backlog": standing.waiting, "oldest_seconds": age},
    )


def shards(patient: Patient) -> Iterator[Finding]:
    """Name events that relays in company pass by: each of them reads the shards that it owns."""
    first = select(outbox.c.seq, outbox.c.shard).order_by(outbox.c.seq).limit(_LOOKED_AT).subquery()
    strange = select(first.c.seq, first.c.shard).where(~first.c.shard.between(0, SHARDS - 1))
    with patient.connected() as db:
        found = db.execute(strange.order_by(first.c.seq)).all()
    if found:
        yield Finding(
            check="shards",
            severity=Severity.CRITICAL,
            text=f"{len(found)} of the first {_LOOKED_AT:,} events have a shard that nobody owns, "
            f"as {found[0].shard} of event {found[0].seq}: only a relay that is alone reads them",
            fix=f"let who writes them take  crc32(topic + '\\x1f' + key) % {SHARDS}  (of the id "
            "where there is no key), and run a single relay until they are gone",
            facts={"events": len(found), "seq": found[0].seq, "shard": found[0].shard},
        )


def delayed(patient: Patient) -> Iterator[Finding]:
    """Judge whether delayed events leave in time."""
    standing = Backlog(patient.engine).measure()
    late = standing.overdue_seconds
    severity = Severity.of(late, *patient.limits.overdue_seconds)
    text = f"{standing.delayed:,} events wait for their time"
    if severity:
        text += f"; the first has been due for {duration(late)}"
    yield Finding(
        check="delayed",
        severity=severity,
        text=text,
        fix="start a relay: it moves what is due" if severity else None,
        facts={"delayed": standing.delayed, "overdue_seconds": late},
    )


def parked_keys(patient: Patient) -> Iterator[Finding]:
    """Judge whether keys wait for an operator."""
    count = Backlog(patient.engine).measure().parked
    if not count:
        yield Finding(check="parked", severity=Severity.OK, text="no key is parked",
                      facts={"parked": 0})  # fmt: skip
        return
    held = ParkedKeys(patient.engine).waiting(limit=1, held=True)
    if not held:
        yield Finding(check="parked", severity=Severity.OK, facts={"parked": count},
                      text=f"{count:,} events were released: a relay publishes them")  # fmt: skip
        return
    first = held[0]
    name = first.topic if first.key is None else f"{first.topic}/{first.key}"
    yield Finding(
        check="parked",
        severity=Severity.WARNING,
        text=f"{count:,} events are parked; the first is {name}: {first.error}",
        fix="run  holdfast outbox parked list,  then edit, release or skip with --reason",
        facts={"parked": count, "first": first.first},
    )


def clock_skew(patient: Patient) -> Iterator[Finding]:
    """Judge whether this host and the database agree on the time."""
    with patient.connected() as db:
        patient.now(db)  # the first statement also pays for the connection
        before = seconds_since_epoch(patient.clock.now())
        theirs = patient.now(db)
        after = seconds_since_epoch(patient.clock.now())
    skew = theirs - (before + after) / 2
    off = max(0.0, abs(skew) - (after - before) / 2)
    severity = Severity.of(off, *patient.limits.skew_seconds)
    ahead = "ahead of" if skew > 0 else "behind"
    yield Finding(
        check="clock",
        severity=severity,
        text=f"the database is {duration(off)} {ahead} this host"
        if severity
        else "this host and the database agree",
        fix="synchronise both clocks; leases and delays go by the database's, ages by the "
        "writers'" if severity else None,
        facts={"skew_seconds": round(skew, 3)},
    )  # fmt: skip
