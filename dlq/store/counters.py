"""The figures of groups at one moment: what was folded, and what has changed since.

Everything is read in one snapshot, so no fold can come in between, and the changes are read
once, however many they are: by group, kind and hour they answer every question.

Folding changes into the figures of groups: one folder at a time, writers never wait.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.engine import at_one_moment, reading
from holdfast.db.sql import insert_ignoring
from holdfast.db.transactions import committed
from holdfast.dlq.store.schema import change, group, head, hit, hour

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Subquery
    from sqlalchemy.engine import Connection, Engine


KINDS = ("arrived", "reopened", "confirmed", "discarded", "parked")
OPENING = ("arrived", "reopened")
HOUR = 3600
MOST_HITS = 1_000
"""Distinct keys and tenants that are counted per group; then it says "1000 or more"."""
_BATCH = 10_000
_CHUNK = 1_000
_LOCK = "fold"


@dataclass(slots=True)
class _Sum:
    """What a batch of changes adds to one group."""

    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    last: float = 0.0
    first: float = float("inf")
    hours: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    hits: set[tuple[str, str]] = field(default_factory=set)


def state_after(state: str, opened: int, changes: Iterable[tuple[str, int]]) -> str:
    """Return the state of a group that had *opened* messages pending, after *changes*.

    It resolves by itself when nothing is pending any more, and what comes then regresses.
    """
    for kind, n in changes:
        opened += n if kind in OPENING else -n
        if opened <= 0:
            state = "resolved"
        elif state == "resolved" and kind in OPENING:
            state = "regressed"
    return state


def fold(engine: Engine, *, clock: Clock = SYSTEM_CLOCK, batches: int = 10) -> int:
    """Fold what has changed, in several short transactions; return how many changes.

    When somebody else is folding, nothing is left to do here.
    """
    folded = 0
    for _ in range(batches):
        done = committed(engine, _fold_batch, clock=clock)
        folded += done
        if done < _BATCH:
            break
    return folded


def _fold_batch(db: Connection) -> int:
    if not _alone(db):
        return 0
    rows = db.execute(select(change).order_by(change.c.seq).limit(_BATCH)).all()
    if not rows:
        return 0
    sums: dict[str, _Sum] = defaultdict(_Sum)
    order: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for row in rows:
        _add(sums[row.group_id], row)
        order[row.group_id].append((row.kind, row.n))
    _update_groups(db, sums, order)
    _update_hours(db, sums)
    _update_hits(db, sums)
    seqs = [row.seq for row in rows]
    for start in range(0, len(seqs), _CHUNK):
        db.execute(delete(change).where(change.c.seq.in_(seqs[start : start + _CHUNK])))
    return len(rows)


def _alone(db: Connection) -> bool:
    """Whether this transaction is the only one that folds; never waits for another."""
    query = select(head.c.seq).where(head.c.name == _LOCK).with_for_update(skip_locked=True)
    if db.execute(query).first() is not None:
        return True
    there = db.execute(select(head.c.seq).where(head.c.name == _LOCK)).first()
    if there is not None:
        return False
    db.execute(insert_ignoring(db, head), {"name": _LOCK, "seq": 0, "hash": ""})
    return db.execute(query).first() is not None


def _add(total: _Sum, row: Any) -> None:
    total.kinds[row.kind] += row.n
    hours = total.hours[int(row.at // HOUR)]
    hours[0 if row.kind in OPENING else 1] += row.n
    if row.kind in OPENING:
        total.last, total.first = max(total.last, row.at), min(total.first, row.at)
    for kind, value in (("key", row.key_hash), ("tenant", row.tenant), ("version", row.version)):
        if value:
            total.hits.add((kind, value))


def _update_groups(
    db: Connection, sums: dict[str, _Sum], order: dict[str, list[tuple[str, int]]]
) -> None:
    ids = sorted(sums)
    stored: dict[str, Any] = {}
    for start in range(0, len(ids), _CHUNK):
        query = (
            select(
                group.c.group_id,
                group.c.state,
                group.c.alerted_at,
                *(group.c[kind] for kind in KINDS),
            )
            .where(group.c.group_id.in_(ids[start : start + _CHUNK]))
            .order_by(group.c.group_id)
            .with_for_update()
        )
        stored |= {row.group_id: row for row in db.execute(query)}
    values = []
    for name in ids:
        if (row := stored.get(name)) is not None:
            pending = row.arrived + row.reopened - row.confirmed - row.discarded - row.parked
            state = state_after(row.state, pending, order[name])
            added = {f"b_{kind}": sums[name].kinds[kind] for kind in KINDS}
            regressed = state == "regressed" != row.state
            alerted = None if regressed else row.alerted_at
            own = {"b_id": name, "b_state": state, "b_last": sums[name].last}
            values.append({**own, "b_alerted": alerted, **added})
    later = case((group.c.last_seen < bindparam("b_last"), bindparam("b_last")),
                 else_=group.c.last_seen)  # fmt: skip
    if values:
        statement = (
            update(group)
            .where(group.c.group_id == bindparam("b_id"))
            .values(
                state=bindparam("b_state"),
                alerted_at=bindparam("b_alerted"),
                last_seen=later,
                **{kind: group.c[kind] + bindparam(f"b_{kind}") for kind in KINDS},
            )
        )
        db.execute(statement, values)


def _update_hours(db: Connection, sums: dict[str, _Sum]) -> None:
    rows = {
        (name, at): counts
        for name in sorted(sums)
        for at, counts in sorted(sums[name].hours.items())
    }
    keys = list(rows)
    there: set[tuple[str, int]] = set()
    pair = tuple_(hour.c.group_id, hour.c.hour)
    for start in range(0, len(keys), _CHUNK):
        query = select(hour.c.group_id, hour.c.hour).where(pair.in_(keys[start : start + _CHUNK]))
        there |= {(row.group_id, row.hour) for row in db.execute(query)}
    old = [
        {"b_id": name, "b_hour": at, "b_in": rows[name, at][0], "b_out": rows[name, at][1]}
        for name, at in keys
        if (name, at) in there
    ]
    new = [
        {"group_id": name, "hour": at, "arrived": rows[name, at][0], "closed": rows[name, at][1]}
        for name, at in keys
        if (name, at) not in there
    ]
    if old:
        statement = (
            update(hour)
            .where(hour.c.group_id == bindparam("b_id"), hour.c.hour == bindparam("b_hour"))
            .values(
                arrived=hour.c.arrived + bindparam("b_in"),
                closed=hour.c.closed + bindparam("b_out"),
            )
        )
        db.execute(statement, old)
    if new:
        db.execute(insert(hour), new)


def _update_hits(db: Connection, sums: dict[str, _Sum]) -> None:
    counted = _hits_so_far(db, sorted(sums))
    rows = []
    for name in sorted(sums):
        for kind in sorted({kind for kind, _ in sums[name].hits}):
            values = sorted(value for one, value in sums[name].hits if one == kind)
            room = MOST_HITS - counted[name, kind]
            if len(values) > room > 0:  # which of them are counted already?
                known = select(hit.c.value).where(hit.c.group_id == name, hit.c.kind == kind)
                values = sorted(set(values).difference(db.execute(known).scalars()))
            rows += [
                {"group_id": name, "kind": kind, "value": one} for one in values[: max(room, 0)]
            ]
    if rows:
        db.execute(insert_ignoring(db, hit), rows)


def _hits_so_far(db: Connection, names: Sequence[str]) -> dict[tuple[str, str], int]:
    counted: dict[tuple[str, str], int] = defaultdict(int)
    for start in range(0, len(names), _CHUNK):
        query = (
            select(hit.c.group_id, hit.c.kind, func.count())
            .where(hit.c.group_id.in_(names[start : start + _CHUNK]))
            .group_by(hit.c.group_id, hit.c.kind)
        )
        counted |= {(row[0], row[1]): row[2] for row in db.execute(query)}
    return counted


DAY_HOURS = 24
RECENT = 5_000
"""Changes that are not folded yet in which keys, tenants and versions are looked for."""
_GROUPS_AT_ONCE = 500


@dataclass(slots=True)
class Unfolded:
    """What has changed in one group since the last fold."""

    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    last: float = 0.0
    hours: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Arrivals and closings by hour."""


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Yield a connection that sees one moment, whatever others commit meanwhile."""
    own = reading(engine)
    with own.connect() if engine.dialect.name == "sqlite" else at_one_moment(own) as db:
        if db.dialect.name == "postgresql":
            # The planner cannot know how few groups there are, and would sort a million changes.
            db.execute(
                select(
                    func.set_config("work_mem", "64MB", True),
                    func.set_config("enable_sort", "off", True),
                    func.set_config("jit", "off", True),
                )
            )
        yield db


def unfolded(db: Connection, ids: Sequence[str] | None = None) -> dict[str, Unfolded]:
    """Return the changes of each group, or of *ids* alone."""
    at: Any = func.floor(change.c.at / literal(float(HOUR)))
    if db.dialect.name == "postgresql":
        at = cast(at, BigInteger)  # hashed faster than a float
    query = select(
        change.c.group_id, change.c.kind, at.label("hour"), func.sum(change.c.n),
        func.max(change.c.at),
    ).group_by(change.c.group_id, change.c.kind, at)  # fmt: skip
    if ids is not None:
        query = query.where(change.c.group_id.in_(ids))
    found: dict[str, Unfolded] = defaultdict(Unfolded)
    for name, kind, when, n, last in db.execute(query):
        one, opening = found[name], kind in OPENING
        one.kinds[kind] += int(n)
        one.hours[int(when)][0 if opening else 1] += int(n)
        if opening:
            one.last = max(one.last, last)
    return dict(found)


def in_order(db: Connection, ids: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the changes of the groups *ids* one by one, as they came."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for start in range(0, len(ids), _GROUPS_AT_ONCE):
        some = change.c.group_id.in_(ids[start : start + _GROUPS_AT_ONCE])
        query = select(change.c.group_id, change.c.kind, change.c.n).where(some)
        for name, kind, n in db.execute(query.order_by(change.c.seq)):
            found[name].append((kind, n))
    return found


def hits(
    db: Connection, ids: Sequence[str]
) -> tuple[dict[tuple[str, str], int], dict[str, list[str]]]:
    """Return how many different keys and tenants groups hit, and which versions of the service.

    The latest changes that are not folded are counted, too.
    """
    every = _values_hit(ids, ("key", "tenant"))
    counted = select(every.c.group_id, every.c.kind, func.count())
    counts = {
        (name, kind): int(n)
        for name, kind, n in db.execute(counted.group_by(every.c.group_id, every.c.kind))
    }
    versions: dict[str, list[str]] = {}
    for name, _, value in db.execute(select(_values_hit(ids, ("version",)))):
        versions.setdefault(name, []).append(value)
    return counts, versions


def _values_hit(ids: Sequence[str], kinds: Sequence[str]) -> Subquery:
    """Return group, kind and value of everything that was hit, each once."""
    kept = select(hit.c.group_id, hit.c.kind, hit.c.value).where(
        hit.c.group_id.in_(ids), hit.c.kind.in_(kinds)
    )
    recent = select(change).order_by(change.c.seq.desc()).limit(RECENT).subquery()
    columns = {"key": recent.c.key_hash, "tenant": recent.c.tenant, "version": recent.c.version}
    fresh = (
        select(recent.c.group_id, literal(kind), columns[kind]).where(
            recent.c.group_id.in_(ids), columns[kind].is_not(None), columns[kind] != ""
        )
        for kind in kinds
    )
    return kept.union(*fresh).subquery()


def trends(
    db: Connection, ids: Sequence[str], more: dict[str, Unfolded], now: float
) -> dict[str, tuple[int, ...]]:
    """Return the arrivals of each group in the last 24 hours, the current one last."""
    first = int(now // HOUR) - DAY_HOURS + 1
    rows = {name: [0] * DAY_HOURS for name in ids}
    folded = select(hour.c.group_id, hour.c.hour, hour.c.arrived).where(
        hour.c.hour >= first, hour.c.group_id.in_(ids)
    )
    for name, at, n in db.execute(folded):
        if at - first < DAY_HOURS:
            rows[name][at - first] += int(n)
    for name in ids:
        for at, (came, _) in more[name].hours.items() if name in more else ():
            if 0 <= at - first < DAY_HOURS:
                rows[name][at - first] += came
    return {name: tuple(counts) for name, counts in rows.items()}


def flows(
    db: Connection, more: dict[str, Unfolded], now: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return arrivals and closings of all groups in the last 24 hours, by hour."""
    first = int(now // HOUR) - DAY_HOURS + 1
    came, went = [0] * DAY_HOURS, [0] * DAY_HOURS
    folded = (
        select(hour.c.hour, func.sum(hour.c.arrived), func.sum(hour.c.closed))
        .where(hour.c.hour >= first)
        .group_by(hour.c.hour)
    )
    sums = [(int(at), int(opened), int(closed)) for at, opened, closed in db.execute(folded)]
    for one in more.values():
        sums += [(at, opened, closed) for at, (opened, closed) in one.hours.items()]
    for at, opened, closed in sums:
        if 0 <= at - first < DAY_HOURS:
            came[at - first] += opened
            went[at - first] += closed
    return tuple(came), tuple(went)
