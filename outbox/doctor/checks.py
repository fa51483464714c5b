"""The doctor's checks of tables and relays; each only looks, and names the fix.

What waits, who does the work, long transactions that keep vacuum and slots from moving on, and
dead rows of the hot table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from holdfast.clock import seconds_since_epoch
from holdfast.findings import Finding, Severity, counted, duration, size
from holdfast.outbox.parked import ParkedKeys
from holdfast.outbox.relay.monitoring import Backlog
from holdfast.outbox.schema import SHARDS, outbox, relay, shard
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.engine import Row

    from holdfast.outbox.doctor.context import DoctorContext


_OFF = {"false", "off", "no", "0", "f", "n"}
"""How PostgreSQL keeps a table's option that is not true."""
_SETTINGS = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000"


def dead_rows(patient: DoctorContext) -> Iterator[Finding]:
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


_LOOKED_AT = 1000  # what nobody reads comes to be the first


def waiting(patient: DoctorContext) -> Iterator[Finding]:
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


def shards(patient: DoctorContext) -> Iterator[Finding]:
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


def delayed(patient: DoctorContext) -> Iterator[Finding]:
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


def parked_keys(patient: DoctorContext) -> Iterator[Finding]:
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
        text=f"{counted(count, 'event', 'events')} parked; the first is {name}: {first.error}",
        fix="run  holdfast outbox parked list,  then edit, release or skip with --reason",
        facts={"parked": count, "first": first.first},
    )


def clock_skew(patient: DoctorContext) -> Iterator[Finding]:
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


_SHOWN = 5


def alive(patient: DoctorContext) -> Iterator[Finding]:
    """Judge whether a relay is at work, and name those that died."""
    with patient.connected() as db:
        now = patient.now(db)
        rows = db.execute(select(relay).order_by(relay.c.until.desc())).all()
        waits = db.execute(select(outbox.c.seq).limit(1)).first() is not None
        served = db.execute(select(shard.c.shard).where(shard.c.epoch > 0).limit(1)).first()
    living = [row for row in rows if row.until >= now]
    dead = [row for row in rows if row.until < now]
    named = ", ".join(
        f"{row.engine} on {row.host} (alive for another {duration(row.until - now)})"
        for row in living[:_SHOWN]
    )
    facts = {"alive": len(living), "dead": len(dead), "relays": [
        {"id": row.id, "engine": row.engine, "host": row.host,
         "left_seconds": round(row.until - now, 3)} for row in rows
    ]}  # fmt: skip
    if living:
        yield Finding(check="relays", severity=Severity.OK, facts=facts,
                      text=f"{len(living)} at work or on standby: {named}")  # fmt: skip
    elif not waits and not dead and served is None:
        yield Finding(check="relays", severity=Severity.OK, facts=facts,
                      text="none has come yet, and nothing waits for one")  # fmt: skip
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
            text=f"{counted(len(dead), 'relay', 'relays')} ended without a farewell, the last on "
            f"{last.host} "
            f"{duration(now - last.until)} ago",
            fix="see why they died in their logs; the rows go when the next relay ends in order, "
            "or after a day",
            facts={"host": last.host, "id": last.id, "seconds": round(now - last.until, 1)},
        )


def leases(patient: DoctorContext) -> Iterator[Finding]:
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


_TRANSACTIONS_SHOWN, _QUERY = 5, 200


def long_running(patient: DoctorContext) -> Iterator[Finding]:
    """Name the transactions that hold back what is cleaned up, oldest first."""
    limits = patient.limits.transaction_seconds
    with patient.connected() as db:
        most = {"least": limits[0], "most": _TRANSACTIONS_SHOWN}
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
    pids = ", ".join(f"{row.pid} ({row.usename})" for row in hidden[:_TRANSACTIONS_SHOWN])
    return Finding(
        check="transactions",
        severity=Severity.WARNING,
        text=f"{len(hidden)} of other roles are open, and this role may not see since when: "
        f"pid {pids}",
        fix=f"run  GRANT pg_monitor TO {hidden[0].role}  and look again",
        facts={"hidden": [row.pid for row in hidden]},
    )
