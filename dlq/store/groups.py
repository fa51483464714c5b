"""What an operator can see and say about failure groups: problems instead of messages.

One failure group: how large the problem is, whom it hits, and which groups are meant.

What triage decided about the pending messages of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import func, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, Operator
from holdfast.db.text import cut, plain
from holdfast.db.transactions import committed
from holdfast.dlq.store.counters import (
    KINDS,
    MOST_HITS,
    OPENING,
    RECENT,
    Unfolded,
    fold,
    hits,
    in_order,
    snapshot,
    state_after,
    trends,
    unfolded,
)
from holdfast.dlq.store.rows import CLOSED, PENDING
from holdfast.dlq.store.schema import group, message
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection, Engine


STATES = ("new", "acknowledged", "muted", "resolved", "regressed")
_MOST_NAMED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
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
    at_least: bool = False
    """Whether more keys, tenants and versions may be hit: not every change was looked at yet."""
    trend: tuple[int, ...] = ()
    """Arrivals in each of the last 24 hours, the current one last."""

    @property
    def keys_text(self) -> str:
        """The number of keys hit, as far as they are counted."""
        return self._counted(self.keys)

    @property
    def tenants_text(self) -> str:
        """The number of tenants hit, as far as they are counted."""
        return self._counted(self.tenants)

    def _counted(self, number: int) -> str:
        return f"{number}+" if self.at_least or number >= MOST_HITS else str(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Which groups are meant; nothing given means all that are not resolved."""

    topic: str | None = None
    consumer_group: str | None = None
    kind: str | None = None
    states: tuple[str, ...] = ("new", "acknowledged", "muted", "regressed")

    def __post_init__(self) -> None:
        if unknown := set(self.states) - set(STATES):
            raise ConfigurationError(f"state {min(unknown)!r}: use one of {', '.join(STATES)}")

    def where(self, more: dict[str, Unfolded]) -> list[ColumnElement[bool]]:
        """Return the conditions on the table of groups, some of which have changed since."""
        equal = (
            (group.c.topic, self.topic),
            (group.c.consumer_group, self.consumer_group),
            (group.c["class"], self.kind),
        )
        found: list[ColumnElement[bool]] = [
            column == value for column, value in equal if value is not None
        ]
        if "resolved" not in self.states and len(more) <= _MOST_NAMED:
            # What was resolved and has no new change is not even read.
            found.append((group.c.state != "resolved") | group.c.group_id.in_(sorted(more)))
        return found


EVERY_OPEN = GroupFilter()

_PLAIN = (
    "group_id", "title", "stage", "error_type", "topic", "consumer_group", "handler",
    "first_seen", "fingerprint", "algorithm", "sample", "muted_until", "owner", "note",
)  # fmt: skip


_NOTHING = Unfolded()


def read_groups(
    db: Connection, rows: Sequence[Any], more: dict[str, Unfolded], now: float
) -> list[FailureGroup]:
    """Return the groups in *rows* with what has changed since."""
    mixed = [row["group_id"] for row in rows if _may_have_closed(row, more)]
    # In a burst nobody waits for that: the next fold says whether it had closed in between.
    few = sum(sum(more[name].kinds.values()) for name in mixed) <= RECENT
    ordered = in_order(db, mixed) if mixed and few else {}
    return [_read(row, more.get(row["group_id"], _NOTHING), ordered, now) for row in rows]


def newest(db: Connection, group_id: str, states: Sequence[str] = (PENDING, *CLOSED)) -> int | None:
    """Return the number of the newest message of the group in one of *states*.

    State by state, for the index has them so: a million others cost nothing.
    """
    # Not max(): before the table is analysed, PostgreSQL reads the whole group for that.
    number = select(message.c.seq).where(message.c.group_id == group_id)
    number = number.order_by(message.c.seq.desc()).limit(1)
    found = [db.execute(number.where(message.c.state == one)).scalar() for one in states]
    return max((one for one in found if one is not None), default=None)


def _may_have_closed(row: Any, more: dict[str, Unfolded]) -> bool:
    """Whether the order of the changes matters: it may have closed before more came."""
    fresh = more.get(row["group_id"], _NOTHING)
    came = sum(fresh.kinds[kind] for kind in OPENING)
    return came > 0 and sum(fresh.kinds.values()) - came >= _before(row)


def _before(row: Any) -> int:
    return int(sum(row[k] for k in OPENING) - sum(row[k] for k in KINDS if k not in OPENING))


def _read(
    row: Any, fresh: Unfolded, ordered: dict[str, list[tuple[str, int]]], now: float
) -> FailureGroup:
    sums = {kind: int(row[kind]) + fresh.kinds[kind] for kind in KINDS}
    changes = ordered.get(row["group_id"], [pair for pair in fresh.kinds.items() if pair[1]])
    state = state_after(row["state"], _before(row), changes)
    pending = sums["arrived"] + sums["reopened"]
    pending -= sums["confirmed"] + sums["discarded"] + sums["parked"]
    if pending <= 0:
        state = "resolved"  # its last message may have moved to another group
    elif state == "muted" and (row["muted_until"] is None or row["muted_until"] <= now):
        state = "new"
    return FailureGroup(
        kind=row["class"],
        state=state,
        pending=pending,
        total=sums["arrived"],
        last_seen=max(row["last_seen"], fresh.last),
        hints=msgspec.json.decode(row["hints"]),
        confirmed=sums["confirmed"],
        discarded=sums["discarded"],
        parked=sums["parked"],
        **{name: row[name] for name in _PLAIN},
    )


def adorned(
    db: Connection, found: Sequence[FailureGroup], more: dict[str, Unfolded], now: float
) -> list[FailureGroup]:
    """Return *found* with keys, tenants, versions and the trend."""
    ids = [one.group_id for one in found]
    counts, versions = hits(db, ids)
    many = sum(sum(one.kinds.values()) for one in more.values()) > RECENT
    by_hour = trends(db, ids, more, now)
    return [
        replace(
            one,
            keys=counts.get((one.group_id, "key"), 0),
            tenants=counts.get((one.group_id, "tenant"), 0),
            versions=tuple(sorted(versions.get(one.group_id, []))),
            at_least=many and one.group_id in more,
            trend=by_hour[one.group_id],
        )
        for one in found
    ]


class NoSuchGroup(ConfigurationError):
    """No failure group, or more than one, answers to the name."""


class AlreadyOver(ConfigurationError):
    """The group has no pending message: there is nothing to look after."""


class StillOpen(ConfigurationError):
    """The group has messages that are neither confirmed, discarded nor parked."""


class FailureGroups:
    """What an operator can see and say about failure groups; each act is audited."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def listed(self, which: GroupFilter = EVERY_OPEN, *, limit: int = 100) -> list[FailureGroup]:
        """Return the groups, the most urgent first; exact, whether or not changes were folded.

        First what nobody looks after, then what somebody does, then what is muted or over;
        among those the largest.
        """
        now = self._clock.now().timestamp()
        with snapshot(self._engine) as db:
            more = unfolded(db)
            found = self.as_of(db, more, which)[:limit]
            return adorned(db, found, more, now)

    def figures(
        self, which: GroupFilter = EVERY_OPEN, *, limit: int | None = 100
    ) -> list[FailureGroup]:
        """Return the same without trend, keys, tenants and versions; with no *limit*, all."""
        with snapshot(self._engine) as db:
            return self.as_of(db, unfolded(db), which)[:limit]

    def as_of(
        self, db: Connection, more: dict[str, Unfolded], which: GroupFilter = EVERY_OPEN
    ) -> list[FailureGroup]:
        """Return them all, as of the snapshot that *db* sees."""
        now = self._clock.now().timestamp()
        rows = db.execute(select(group).where(*which.where(more))).mappings().all()
        read = zip(rows, read_groups(db, rows, more, now), strict=True)
        # A group that was moved rests, unless a process of the old version still adds to it.
        found = [one for row, one in read if row["moved_to"] is None or one.pending]
        found = [one for one in found if one.state in which.states]
        found.sort(key=_urgency)
        return found

    def find(self, name: str) -> FailureGroup:
        """Return the group whose id begins with *name*."""
        if not name or not name.isalnum():
            raise NoSuchGroup(f"no failure group is called {name!r}: see  holdfast dlq groups")
        now = self._clock.now().timestamp()
        with snapshot(self._engine) as db:
            query = select(group).where(group.c.group_id.startswith(name)).limit(3)
            rows = db.execute(query).mappings().all()
            if not rows:
                raise NoSuchGroup(
                    f"no failure group begins with {name!r}: see  holdfast dlq groups"
                )
            if len(rows) > 1:
                ids = ", ".join(row["group_id"] for row in rows)
                raise NoSuchGroup(f"{name!r} begins several groups ({ids}, …): write more of it")
            more = unfolded(db, [rows[0]["group_id"]])
            return adorned(db, read_groups(db, rows, more, now), more, now)[0]

    def acknowledge(
        self, name: str, operator: Operator, *, owner: str | None = None
    ) -> FailureGroup:
        """Say that somebody looks after the group; refused when nothing of it is pending."""
        values: dict[str, Any] = {"state": "acknowledged", "owner": cut(owner or operator.actor)}
        return self._act(name, operator, "acknowledge", values, _require_open)

    def mute(self, name: str, operator: Operator, *, until: datetime) -> FailureGroup:
        """Keep the group out of alerts *until* then; it counts on, and is told again then."""
        seconds = until.timestamp()
        if seconds <= self._clock.now().timestamp():
            raise ConfigurationError(f"muting until {until.isoformat()}: name a moment to come")
        values = {"state": "muted", "muted_until": seconds, "alerted_at": None}
        return self._act(name, operator, "mute", values, _require_open)

    def annotate(self, name: str, operator: Operator, *, note: str) -> FailureGroup:
        """Keep a note with the group, for whoever looks next."""
        return self._act(name, operator, "note", {"note": plain(note)})

    def resolve(self, name: str, operator: Operator) -> FailureGroup:
        """Say that the problem is over; refused while a message of it is pending."""
        return self._act(name, operator, "resolve", {"state": "resolved"}, _require_over)

    def _act(
        self,
        name: str,
        operator: Operator,
        action: str,
        values: dict[str, Any],
        check: Callable[[FailureGroup], None] = lambda _: None,
    ) -> FailureGroup:
        fold(self._engine, clock=self._clock)  # what came before is not to undo what is said now
        found = self.find(name)

        def work(db: Connection) -> None:
            where = group.c.group_id == found.group_id
            # Nothing is folded while the row is locked: what is said fits what is there now.
            rows = db.execute(select(group).where(where).with_for_update()).mappings().all()
            more = unfolded(db, [found.group_id])
            check(*read_groups(db, rows, more, self._clock.now().timestamp()))
            db.execute(update(group).where(where).values(**values))
            kept = {key: value for key, value in values.items() if key in _SAID}
            self._audit.append(db, operator, action, found.group_id, kept)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.group_id)


_TURN = {"regressed": 0, "new": 0, "acknowledged": 1, "muted": 2, "resolved": 3}


def _urgency(one: FailureGroup) -> tuple[int, int, float, str]:
    return _TURN[one.state], -one.pending, -one.last_seen, one.group_id


_SAID = ("state", "owner", "muted_until")


def _require_open(found: FailureGroup) -> None:
    """Refuse what would hide a recurrence: a problem that is over must be able to return."""
    if not found.pending:
        raise AlreadyOver(
            f"group {found.group_id} has nothing pending, it is {found.state}: should it "
            "return, it is told as regressed"
        )


def _require_over(found: FailureGroup) -> None:
    if found.pending:
        raise StillOpen(
            f"group {found.group_id} has {found.pending} pending messages: replay them, or "
            f"discard or park them with a reason"
        )


MOST = 10_000
"""Messages of a group that are looked at: the latest, so that a million cost no more."""


class Judged(NamedTuple):
    """How many messages have one verdict, and when the next of them is tried by itself."""

    pending: int
    next_retry: float | None


def verdicts(db: Connection, group_id: str) -> dict[str, Judged]:
    """Return the verdicts on the latest pending messages of the group."""
    latest = (
        select(message.c.verdict, message.c.due_at)
        .where(message.c.group_id == group_id, message.c.state == PENDING)
        .order_by(message.c.seq.desc())
        .limit(MOST)
        .subquery()
    )
    query = select(latest.c.verdict, func.count(), func.min(latest.c.due_at))
    rows = db.execute(query.group_by(latest.c.verdict).order_by(latest.c.verdict))
    return {verdict: Judged(count, due) for verdict, count, due in rows}


__all__ = [
    "EVERY_OPEN",
    "STATES",
    "AlreadyOver",
    "FailureGroup",
    "FailureGroups",
    "GroupFilter",
    "NoSuchGroup",
    "StillOpen",
]
