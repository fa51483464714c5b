"""Regrouping after the algorithm changed: explicit, counted, and mapped from old to new."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, Operator
from holdfast.db.sql import insert_ignoring
from holdfast.db.transactions import committed
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.rows import PENDING, change_row, fingerprint_of, group_of, letter_of
from holdfast.dlq.store.schema import change, group, message, regrouped
from holdfast.dlq.store.store import ensure_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.capture.fingerprint import Fingerprint
    from holdfast.dlq.letter import Failure

_BATCH = 500


def regroup(
    engine: Engine,
    operator: Operator,
    *,
    fingerprint: Callable[[Failure], Fingerprint] = fingerprint_of,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[tuple[str, str], int]:
    """Give every message the group that *fingerprint* says; return what moved from where to where.

    The map stays in `holdfast_dlq_regrouped`. State, owner and note go along to a group that
    did not exist. Batches commit one by one, and a broken-off run is simply run again.
    """
    moved: Counter[tuple[str, str]] = Counter()
    before = begin_regroup(engine, clock=clock)
    last = 0
    while True:
        work = functools.partial(_batch, after=last, fingerprint=fingerprint, clock=clock)
        batch = committed(engine, work, clock=clock)
        if batch is None:
            break
        last, pairs = batch
        moved.update(pairs)
    finish_regroup(engine, moved, before, operator, clock=clock)
    return dict(moved)


Before = dict[str, tuple[str, float | None]]
"""State and last alert of each group, before anything moved."""


def begin_regroup(engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> Before:
    """Return what is said of the groups now; `finish_regroup` wants it."""
    fold(engine, clock=clock)
    with engine.connect() as db:
        columns = (group.c.group_id, group.c.state, group.c.alerted_at)
        return {row.group_id: (row.state, row.alerted_at) for row in db.execute(select(*columns))}


def regroup_letters(
    engine: Engine, dlq_ids: Sequence[str], *, clock: Clock = SYSTEM_CLOCK
) -> dict[tuple[str, str], int]:
    """Give the letters *dlq_ids* the groups of today's rules; return what moved.

    A part of a regrouping that several processes share: one calls `begin_regroup` before all of
    them and `finish_regroup` after. Ids that the store does not have are passed over.
    """
    moved: Counter[tuple[str, str]] = Counter()
    ordered = sorted(set(dlq_ids))  # always in the same order: no deadlocks
    for start in range(0, len(ordered), _BATCH):
        some = message.c.dlq_id.in_(ordered[start : start + _BATCH])
        work = functools.partial(_moved, which=some, fingerprint=fingerprint_of, clock=clock)
        moved.update(committed(engine, work, clock=clock))
    return dict(moved)


def finish_regroup(
    engine: Engine,
    moved: Mapping[tuple[str, str], int],
    before: Before,
    operator: Operator,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Fold the figures, keep what was said of groups, and write down what was done."""
    fold(engine, clock=clock)
    counted = Counter(moved)

    def finish(db: Connection) -> None:
        _keep_states(db, counted, before)
        _finish(db, counted, operator, clock)

    committed(engine, finish, clock=clock)


def moves(db: Connection) -> list[tuple[str, str, int]]:
    """Return the kept map: old group, new group, how many messages."""
    query = select(regrouped.c.old_group, regrouped.c.new_group, regrouped.c.moved)
    return [(row[0], row[1], row[2]) for row in db.execute(query.order_by(regrouped.c.at))]


def _batch(
    db: Connection, after: int, fingerprint: Callable[[Failure], Fingerprint], clock: Clock
) -> tuple[int, Counter[tuple[str, str]]] | None:
    some = select(message.c.seq).where(message.c.seq > after).order_by(message.c.seq).limit(_BATCH)
    seqs = list(db.execute(some).scalars())
    if not seqs:
        return None
    return seqs[-1], _moved(db, message.c.seq.in_(seqs), fingerprint, clock)


def _moved(
    db: Connection,
    which: ColumnElement[bool],
    fingerprint: Callable[[Failure], Fingerprint],
    clock: Clock,
) -> Counter[tuple[str, str]]:
    """Give the letters *which* their groups, in the transaction of *db*; return what moved."""
    locked = select(message).where(which).order_by(message.c.seq)
    rows = db.execute(locked.with_for_update()).mappings().all()
    pairs: Counter[tuple[str, str]] = Counter()
    now = clock.now().timestamp()
    for row in rows:
        letter = letter_of(row)
        found = fingerprint(letter.failure)
        name = group_of(letter, found)
        if name == row["group_id"]:
            continue
        ensure_group(db, letter, {**row, "group_id": name}, found)
        values = {"group_id": name, "fingerprint": found.value}
        db.execute(update(message).where(message.c.seq == row["seq"]).values(**values))
        db.execute(insert(change), _figures(row, name))
        pairs[row["group_id"], name] += 1
    for (old, new), count in sorted(pairs.items()):  # in one order: no deadlocks
        _note_move(db, old, new, count, now)
    return pairs


def _figures(row: Any, name: str) -> list[dict[str, Any]]:
    """Return the changes that take *row* out of its old group and into the new one."""
    kinds = ["arrived"] if row["state"] == PENDING else ["arrived", row["state"]]
    at = row["stored_at"]
    return [
        change_row({**row, "group_id": group_id}, kind, at, n)
        for group_id, n in ((row["group_id"], -1), (name, 1))
        for kind in kinds
    ]


def _note_move(db: Connection, old: str, new: str, count: int, now: float) -> None:
    where = (regrouped.c.old_group == old) & (regrouped.c.new_group == new)
    algorithm = select(group.c.algorithm).where(group.c.group_id == new).scalar_subquery()
    values = {"old_group": old, "new_group": new, "moved": 0, "at": now, "algorithm": ""}
    db.execute(insert_ignoring(db, regrouped), values)
    more = {"moved": regrouped.c.moved + count, "at": now, "algorithm": algorithm}
    db.execute(update(regrouped).where(where).values(**more))
    said = db.execute(select(group).where(group.c.group_id == old)).mappings().first()
    if said is not None:
        kept = {name: said[name] for name in ("owner", "note", "muted_until")}
        if said["state"] in ("acknowledged", "muted"):
            kept["state"] = said["state"]
        fresh = (group.c.group_id == new) & group.c.owner.is_(None) & (group.c.state == "new")
        db.execute(update(group).where(fresh).values(**kept))


def _keep_states(
    db: Connection, moved: Counter[tuple[str, str]], before: dict[str, tuple[str, float | None]]
) -> None:
    """Have groups that got messages say what was said before: moving is no recurrence."""
    for (old, new), _ in reversed(moved.most_common()):  # the largest source has the last word
        state, alerted = before.get(new, before[old])
        if state != "resolved":
            looks_new = (group.c.group_id == new) & (group.c.state == "regressed")
            values = {"state": state, "alerted_at": alerted}
            db.execute(update(group).where(looks_new).values(**values))


def _finish(
    db: Connection, moved: Counter[tuple[str, str]], operator: Operator, clock: Clock
) -> None:
    """Send emptied groups to rest, and write down what was done."""
    into: dict[str, str] = {}
    for (old, new), _ in moved.most_common():
        into.setdefault(old, new)
    for old, new in sorted(into.items()):
        if not _is_left(db, old):
            db.execute(update(group).where(group.c.group_id == old).values(moved_to=new))
    detail = {"groups": len(into), "messages": sum(moved.values()), "into": _first(into)}
    Audit(clock=clock).append(db, operator, "regroup", "all groups", detail)


def _is_left(db: Connection, name: str) -> bool:
    query = select(func.count()).select_from(message).where(message.c.group_id == name)
    return bool(db.execute(query).scalar_one())


def _first(into: dict[str, str], most: int = 100) -> Sequence[tuple[str, str]]:
    return sorted(into.items())[:most]
