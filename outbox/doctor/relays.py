"""Who does the work: relays that live, relays that died, shards that nobody serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

from holdfast.outbox.doctor.finding import Finding, Severity, duration
from holdfast.outbox.schema import SHARDS, outbox, relay, shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.outbox.doctor.patient import Patient

_SHOWN = 5


def alive(patient: Patient) -> Iterator[Finding]:
    """Judge whether a relay is at work, and name those that died."""
    with patient.connected() as db:
        now = patient.now(db)
        rows = db.execute(select(relay).order_by(relay.c.until.desc())).all()
        waits = db.execute(select(outbox.c.seq).limit(1)).first() is not None
    living = [row for row in rows if row.until >= now]
    dead = [row for row in rows if row.until < now]
    named = ", ".join(f"{row.engine} on {row.host}" for row in living[:_SHOWN])
    facts = {"alive": len(living), "dead": len(dead)}
    if living:
        yield Finding(check="relays", severity=Severity.OK, facts=facts,
                      text=f"{len(living)} at work or on standby: {named}")  # fmt: skip
    else:
        yield Finding(
            check="relays",
            severity=Severity.CRITICAL if waits else Severity.WARNING,
            text="no relay is at work" + (", and events wait" if waits else ""),
            fix="start one:  holdfast relay --database … --broker …",
            facts=facts,
        )
    if dead:
        last = dead[0]
        yield Finding(
            check="relays",
            severity=Severity.WARNING,
            text=f"{len(dead)} relays ended without a farewell, the last on {last.host} "
            f"{duration(now - last.until)} ago",
            fix="see why they died in their logs; the rows go when the next relay ends in order, "
            "or after a day",
            facts={"host": last.host, "id": last.id, "seconds": round(now - last.until, 1)},
        )


def leases(patient: Patient) -> Iterator[Finding]:
    """Judge whether every shard is served, and say by whom."""
    with patient.connected() as db:
        now = patient.now(db)
        held = select(shard.c.owner, func.count()).where(
            shard.c.owner.is_not(None), shard.c.until >= now
        )
        owners = db.execute(held.group_by(shard.c.owner)).all()
        hosts = {row.id: row.host for row in db.execute(select(relay.c.id, relay.c.host))}
    served = sum(count for _, count in owners)
    facts = {"served": served, "owners": {owner: count for owner, count in owners}}  # noqa: C416
    shared = ", ".join(f"{hosts.get(owner, '?')}: {count}" for owner, count in owners[:_SHOWN])
    if served == SHARDS:
        yield Finding(check="leases", severity=Severity.OK, facts=facts,
                      text=f"all {SHARDS} shards are served ({shared})")  # fmt: skip
        return
    yield Finding(
        check="leases",
        severity=Severity.WARNING if owners else Severity.OK,
        text=f"{served} of {SHARDS} shards are served" + (f" ({shared})" if shared else ""),
        fix="wait for one lease (10 s unless set otherwise): relays take over what is free; if "
        "it stays so, restart the relay that should have it" if owners else None,
        facts=facts,
    )  # fmt: skip
