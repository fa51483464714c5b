"""Folding changes into the figures of groups: one folder at a time, writers never wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, case, delete, func, insert, select, tuple_, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.schema import change, group, head, hit, hour
from holdfast.dlq.store import insert_ignoring
from holdfast.dlq.transactions import committed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
