"""Failure groups: problems instead of messages, and what may be said about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import case, func, literal, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.audit import Audit, Warrant
from holdfast.dlq.rows import cut, plain
from holdfast.dlq.schema import change, group, hit, hour
from holdfast.dlq.tally import HOUR, KINDS, MOST_HITS, OPENING, state_after
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection, Engine

STATES = ("new", "acknowledged", "muted", "resolved", "regressed")
DAY_HOURS = 24
_RECENT = 5_000


class NoSuchGroup(ConfigurationError):
    """No failure group, or more than one, answers to the name."""


class StillOpen(ConfigurationError):
    """The group has messages that are neither confirmed, discarded nor parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One problem: how large it is, whom it hits, since when, and what was said about it."""

    group_id: str
    title: str
    state: str
    kind: str
    stage: str
    error_type: str
    topic: str
    consumer_group: str
    handler: str
    pending: int
    total: int
    confirmed: int
    discarded: int
    parked: int
    first_seen: float
    last_seen: float
    fingerprint: str
    algorithm: str
    sample: str
    hints: dict[str, Any]
    muted_until: float | None = None
    owner: str | None = None
    note: str | None = None
    keys: int = 0
    tenants: int = 0
    versions: tuple[str, ...] = ()
    trend: tuple[int, ...] = ()
    """Arrivals in each of the last 24 hours, the current one last."""

    @property
    def keys_text(self) -> str:
        """The number of keys hit, as far as they are counted."""
        return f"{MOST_HITS}+" if self.keys >= MOST_HITS else str(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which groups are meant; nothing given means all that are not resolved."""

    topic: str | None = None
    consumer_group: str | None = None
    kind: str | None = None
    states: tuple[str, ...] = ("new", "acknowledged", "muted", "regressed")

    def __post_init__(self) -> None:
        if unknown := set(self.states) - set(STATES):
            raise ConfigurationError(f"state {min(unknown)!r}: use one of {', '.join(STATES)}")


EVERY_OPEN = Which()


class Groups:
    """What an operator can see and say about failure groups; each act is audited."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def listed(self, which: Which = EVERY_OPEN, *, limit: int = 100) -> list[Group]:
        """Return the groups, the largest first; exact, whether or not changes were folded."""
        found = self.figures(which, limit=limit)
        with self._engine.connect() as db:
            return _adorned(db, found, self._clock.now().timestamp())

    def figures(self, which: Which = EVERY_OPEN, *, limit: int = 100) -> list[Group]:
        """Return the same without trend, keys, tenants and versions."""
        now = self._clock.now().timestamp()
        with self._engine.connect() as db:
            rows = db.execute(_query(which)).mappings().all()
        read = ((row["moved_to"], self._read(row, now)) for row in rows)
        # A group that was moved rests, unless a process of the old version still adds to it.
        found = [one for moved, one in read if moved is None or one.pending]
        found = [one for one in found if one.state in which.states]
        found.sort(key=lambda one: (-one.pending, -one.last_seen, one.group_id))
        return found[:limit]

    def find(self, name: str) -> Group:
        """Return the group whose id begins with *name*."""
        if not name or not name.isalnum():
            raise NoSuchGroup(f"no failure group is called {name!r}: see  holdfast dlq groups")
        now = self._clock.now().timestamp()
        with self._engine.connect() as db:
            query = _query(Which(states=STATES)).where(group.c.group_id.startswith(name)).limit(3)
            rows = db.execute(query).mappings().all()
            if not rows:
                raise NoSuchGroup(
                    f"no failure group begins with {name!r}: see  holdfast dlq groups"
                )
            if len(rows) > 1:
                ids = ", ".join(row["group_id"] for row in rows)
                raise NoSuchGroup(f"{name!r} begins several groups ({ids}, …): write more of it")
            return _adorned(db, [self._read(rows[0], now)], now)[0]

    def acknowledge(self, name: str, warrant: Warrant, *, owner: str | None = None) -> Group:
        """Say that somebody looks after the group."""
        values: dict[str, Any] = {"state": "acknowledged", "owner": cut(owner or warrant.actor)}
        return self._act(name, warrant, "acknowledge", values)

    def mute(self, name: str, warrant: Warrant, *, until: datetime) -> Group:
        """Keep the group out of alerts *until* then; it goes on counting."""
        seconds = until.timestamp()
        if seconds <= self._clock.now().timestamp():
            raise ConfigurationError(f"muting until {until.isoformat()}: name a moment to come")
        return self._act(name, warrant, "mute", {"state": "muted", "muted_until": seconds})

    def annotate(self, name: str, warrant: Warrant, *, note: str) -> Group:
        """Keep a note with the group, for whoever looks next."""
        return self._act(name, warrant, "note", {"note": plain(note)})

    def resolve(self, name: str, warrant: Warrant) -> Group:
        """Say that the problem is over; refused while a message of it is pending."""
        found = self.find(name)
        if found.pending:
            raise StillOpen(
                f"group {found.group_id} has {found.pending} pending messages: replay them, or "
                f"discard or park them with a reason"
            )
        return self._act(name, warrant, "resolve", {"state": "resolved"})

    def _act(self, name: str, warrant: Warrant, action: str, values: dict[str, Any]) -> Group:
        found = self.find(name)

        def work(db: Connection) -> None:
            where = group.c.group_id == found.group_id
            db.execute(update(group).where(where).values(**values))
            detail = {key: value for key, value in values.items() if key != "note"}
            self._audit.append(db, warrant, action, found.group_id, detail)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.group_id)

    def _read(self, row: Any, now: float) -> Group:
        sums = {kind: int(row[kind]) + int(row[f"more_{kind}"] or 0) for kind in KINDS}
        before = sum(row[k] for k in OPENING) - sum(row[k] for k in KINDS if k not in OPENING)
        more = [(kind, int(row[f"more_{kind}"] or 0)) for kind in KINDS]
        state = state_after(row["state"], int(before), [pair for pair in more if pair[1]])
        if state == "muted" and (row["muted_until"] is None or row["muted_until"] <= now):
            state = "new"
        pending = sums["arrived"] + sums["reopened"]
        pending -= sums["confirmed"] + sums["discarded"] + sums["parked"]
        return Group(
            kind=row["class"],
            state=state,
            pending=pending,
            total=sums["arrived"],
            last_seen=max(row["last_seen"], row["more_last"] or 0.0),
            hints=msgspec.json.decode(row["hints"]),
            confirmed=sums["confirmed"],
            discarded=sums["discarded"],
            parked=sums["parked"],
            **{name: row[name] for name in _PLAIN},
        )


_PLAIN = (
    "group_id", "title", "stage", "error_type", "topic", "consumer_group", "handler",
    "first_seen", "fingerprint", "algorithm", "sample", "muted_until", "owner", "note",
)  # fmt: skip


def _query(which: Which) -> Any:
    """Return one statement over figures and unfolded changes: no fold can come in between."""
    more = (
        select(
            change.c.group_id,
            func.max(case((change.c.kind.in_(OPENING), change.c.at))).label("more_last"),
            *(
                func.sum(case((change.c.kind == kind, change.c.n), else_=0)).label(f"more_{kind}")
                for kind in KINDS
            ),
        )
        .group_by(change.c.group_id)
        .subquery()
    )
    added = [more.c[f"more_{kind}"] for kind in KINDS] + [more.c.more_last]
    query = select(group, *added).outerjoin(more, more.c.group_id == group.c.group_id)
    if which.topic is not None:
        query = query.where(group.c.topic == which.topic)
    if which.consumer_group is not None:
        query = query.where(group.c.consumer_group == which.consumer_group)
    if which.kind is not None:
        query = query.where(group.c["class"] == which.kind)
    if "resolved" not in which.states:
        # What was resolved and has no new change is not even read.
        query = query.where((group.c.state != "resolved") | more.c.group_id.is_not(None))
    return query


def _adorned(db: Connection, found: Sequence[Group], now: float) -> list[Group]:
    """Return *found* with keys, tenants, versions and the trend."""
    ids = [one.group_id for one in found]
    counts: dict[tuple[str, str], int] = {}
    versions: dict[str, list[str]] = {}
    for name, kind, value in db.execute(_hits(ids)):
        counts[name, kind] = counts.get((name, kind), 0) + 1
        if kind == "version":
            versions.setdefault(name, []).append(value)
    trends = trend_of(db, ids, now)
    return [
        replace(
            one,
            keys=counts.get((one.group_id, "key"), 0),
            tenants=counts.get((one.group_id, "tenant"), 0),
            versions=tuple(sorted(versions.get(one.group_id, []))),
            trend=trends.get(one.group_id, (0,) * DAY_HOURS),
        )
        for one in found
    ]


def _hits(ids: Sequence[str]) -> Any:
    """Return the distinct hits of groups, also of the latest changes that are not folded."""
    kept = select(hit.c.group_id, hit.c.kind, hit.c.value).where(hit.c.group_id.in_(ids))
    recent = select(change).order_by(change.c.seq.desc()).limit(_RECENT).subquery()
    columns = {"key": recent.c.key_hash, "tenant": recent.c.tenant, "version": recent.c.version}
    fresh = (
        select(recent.c.group_id, literal(kind), column).where(
            recent.c.group_id.in_(ids), column.is_not(None), column != ""
        )
        for kind, column in columns.items()
    )
    return kept.union(*fresh)


def trend_of(db: Connection, ids: Sequence[str], now: float) -> dict[str, tuple[int, ...]]:
    """Return the arrivals of each group in the last 24 hours, also those not yet folded."""
    current = int(now // HOUR)
    first = current - DAY_HOURS + 1
    at = hour.c.hour.label("hour")
    folded = select(hour.c.group_id, at, hour.c.arrived.label("n")).where(
        hour.c.hour >= first, hour.c.group_id.in_(ids)
    )
    hour_of = func.floor(change.c.at / literal(float(HOUR))).label("hour")
    fresh = (
        select(change.c.group_id, hour_of, func.sum(change.c.n))
        .where(change.c.at >= first * HOUR, change.c.group_id.in_(ids), change.c.kind.in_(OPENING))
        .group_by(change.c.group_id, hour_of)
    )
    rows: dict[str, list[int]] = {}
    for name, when, n in db.execute(folded.union_all(fresh)):
        place = int(when) - first
        if 0 <= place < DAY_HOURS:
            rows.setdefault(name, [0] * DAY_HOURS)[place] += int(n)
    return {name: tuple(counts) for name, counts in rows.items()}
