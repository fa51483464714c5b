"""What the doctor looks at of consumers: held keys, shared circuits, lag against retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import case, func, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.lag import LagWatch
from holdfast.consumer.schema import held_key
from holdfast.consumer.shared_circuits import CircuitAdmin
from holdfast.db.clock import database_now
from holdfast.errors import UnknownGroup, Unsupported
from holdfast.findings import Finding, Look, Severity, counted, duration
from holdfast.ports import BrokerPowers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.consumer.lag import LaneLag
    from holdfast.ports import Broker

_LATE = 60.0, 600.0  # seconds by which a retry of a held key may be late
_SHOWN = 5
_BEHIND = 10_000  # messages
_WINDOW = 1.0  # one look is all: whether a group moves is told by `holdfast lag`


def looks(engine: Engine) -> list[Look]:
    """Return what there is to look at; the tables of a consumer must be there."""
    return [Look("keys", lambda: keys(engine)), Look("circuits", lambda: circuits(engine))]


def keys(engine: Engine) -> Iterator[Finding]:
    """Judge the keys that are held: behind a dead letter, or until a retry that must come."""
    is_closed = held_key.c.dlq_id.is_not(None)
    with engine.connect() as db:
        now = float(db.execute(select(database_now())).scalar_one())
        total, behind, parked, since, due = db.execute(
            select(
                func.count(),
                func.sum(case((is_closed, 1), else_=0)),
                func.sum(held_key.c.parked),
                func.min(case((is_closed, held_key.c.since))),
                func.min(case((~is_closed, held_key.c.due))),
            )
        ).one()
    behind, parked = int(behind or 0), int(parked or 0)
    facts = {"held": total, "behind_dead_letters": behind, "parked_messages": parked}
    if not total:
        yield Finding(check="keys", severity=Severity.OK, text="none is held", facts=facts)
        return
    messages = counted(parked, "message waits", "messages wait")
    if behind:
        yield Finding(
            check="keys",
            severity=Severity.WARNING,
            text=f"{counted(behind, 'key', 'keys')} held behind a dead letter, the first for "
            f"{duration(now - since)}; {messages} behind held keys",
            fix="run  holdfast keys list,  then replay or discard the dead letter of each",
            facts={**facts, "oldest_seconds": round(now - since, 3)},
        )
    if total - behind:
        late = 0.0 if due is None else max(0.0, now - due)
        severity = Severity.of(late, *_LATE)
        text = f"{counted(total - behind, 'key', 'keys')} held until a retry"
        if severity:
            text += f", the first due for {duration(late)}: no consumer runs it"
        elif not behind:
            text += f"; {messages} behind"
        yield Finding(
            check="keys",
            severity=severity,
            text=text,
            fix="start the consumer:  holdfast consume MODULE:CONSUMER" if severity else None,
            facts={**facts, "late_seconds": round(late, 3)},
        )


def circuits(engine: Engine) -> Iterator[Finding]:
    """Name the shared circuits that are open."""
    found = CircuitAdmin(engine).circuits()
    is_open = [one for one in found if one.is_open]
    if not is_open:
        told = counted(len(found), "shared, closed", "shared, all closed")
        yield Finding(check="circuits", severity=Severity.OK, facts={"shared": len(found)},
                      text=told if found else "none is shared")  # fmt: skip
    for one in is_open[:_SHOWN]:
        again = f"tried again in {duration(one.seconds)}" if one.seconds else "tried again now"
        yield Finding(
            check="circuits",
            severity=Severity.WARNING,
            text=f"{one.name} is open, {again}: what needs it is paused",
            fix=f"see why {one.name} fails; once it is back:  holdfast circuits close {one.name} "
            "--reason …",
            facts={"circuit": one.name, "seconds": one.seconds},
        )
    if len(is_open) > _SHOWN:
        yield Finding(
            check="circuits",
            severity=Severity.WARNING,
            text=f"{len(is_open) - _SHOWN:,} more are open",
            fix="run  holdfast circuits list",
            facts={"open": len(is_open)},
        )


def lag(
    broker: Broker, groups: Mapping[str, Sequence[str]], *, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Finding]:
    """Judge how far behind *groups* are in what they read: will retention eat it, is nobody there.

    A group has topics or names of handlers; the first are asked for where the broker cannot tell.
    """
    known = BrokerPowers.of(broker).topics()
    read = False
    for group, names in groups.items():
        topics = [name for name in names if known is None or name in known]
        for lanes in _lanes(broker, group, topics, clock):
            read = True
            yield from judged_lag(group, lanes)
    if not read:
        yield Finding(check="lag", severity=Severity.OK, text="no group of this database reads")


def _lanes(
    broker: Broker, group: str, topics: Sequence[str], clock: Clock
) -> Iterator[list[LaneLag]]:
    try:
        yield LagWatch(broker, group, None, window=_WINDOW, clock=clock).look()
    except Unsupported:
        if topics:
            yield LagWatch(broker, group, topics, window=_WINDOW, clock=clock).look()
    except UnknownGroup:
        return


def judged_lag(group: str, lanes: Sequence[LaneLag]) -> Iterator[Finding]:
    """Judge one look at the lanes of *group*."""
    total = sum(one.progress.unsettled for one in lanes)
    oldest = max((one.seconds or 0.0 for one in lanes), default=0.0)
    topics = sorted({one.lane.topic for one in lanes if one.progress.unsettled})
    facts = {"group": group, "lag": total, "oldest_seconds": round(oldest, 3), "topics": topics}
    look = f"holdfast lag --group {group}"
    text = f"{group} is {counted(total, 'message', 'messages')} behind"
    text += f", the oldest is {duration(oldest)} old" if oldest else ""
    near = [one for one in lanes if one.is_near_retention]
    deleted = sum(one.progress.deleted for one in lanes)
    idle = bool(total) and all(one.members == 0 for one in lanes if one.progress.unsettled)
    if near:
        first = min(near, key=lambda one: one.retention_left or 0.0)
        left = duration(max(0.0, first.retention_left or 0.0))
        yield Finding(
            check="lag", severity=Severity.CRITICAL,
            text=f"{text}: retention deletes it from {first.lane.topic} in {left}",
            fix=f"start or add consumers of {group}, or let {first.lane.topic} keep messages for "
            f"longer; watch it with  {look} --watch",
            facts={**facts, "retention_left_seconds": first.retention_left},
        )  # fmt: skip
    elif idle:
        yield Finding(
            check="lag", severity=Severity.WARNING, text=f"{text}, and nobody is a member",
            fix=f"start its consumer:  holdfast consume MODULE:CONSUMER;  see  {look}", facts=facts,
        )  # fmt: skip
    else:
        severity = Severity.of(total, _BEHIND, float("inf"))
        fix = f"see whether it moves:  {look}" if severity else None
        yield Finding(check="lag", severity=severity, text=text, fix=fix, facts=facts)
    if deleted:
        yield Finding(
            check="lag", severity=Severity.CRITICAL,
            text=f"{counted(deleted, 'message', 'messages')} deleted before {group} settled them",
            fix=f"find out which with  {look},  and publish them again from their source",
            facts={"group": group, "deleted": deleted},
        )  # fmt: skip
