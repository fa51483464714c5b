"""The figures of groups at one moment: what was folded, and what has changed since.

Everything is read in one snapshot, so no fold can come in between, and the changes are read
once, however many they are: by group, kind and hour they answer every question.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, cast, func, literal, select

from holdfast.database import reading
from holdfast.dlq.schema import change, hit, hour
from holdfast.dlq.tally import HOUR, KINDS, OPENING
from holdfast.isolation import at_one_moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Subquery
    from sqlalchemy.engine import Connection, Engine

DAY_HOURS = 24
RECENT = 5_000
"""Changes that are not folded yet in which keys, tenants and versions are looked for."""
_CHUNK = 500


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
    for start in range(0, len(ids), _CHUNK):
        some = change.c.group_id.in_(ids[start : start + _CHUNK])
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
