"""One failure group: how large the problem is, whom it hits, and which groups are meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select

from holdfast.dlq.figures import RECENT, Unfolded, hits, in_order, trends
from holdfast.dlq.rows import CLOSED, PENDING
from holdfast.dlq.schema import group, message
from holdfast.dlq.tally import KINDS, MOST_HITS, OPENING, state_after
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Connection

STATES = ("new", "acknowledged", "muted", "resolved", "regressed")
_MOST_NAMED = 1_000


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
class Which:
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


EVERY_OPEN = Which()

_PLAIN = (
    "group_id", "title", "stage", "error_type", "topic", "consumer_group", "handler",
    "first_seen", "fingerprint", "algorithm", "sample", "muted_until", "owner", "note",
)  # fmt: skip


_NOTHING = Unfolded()


def read_groups(
    db: Connection, rows: Sequence[Any], more: dict[str, Unfolded], now: float
) -> list[Group]:
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
) -> Group:
    sums = {kind: int(row[kind]) + fresh.kinds[kind] for kind in KINDS}
    changes = ordered.get(row["group_id"], [pair for pair in fresh.kinds.items() if pair[1]])
    state = state_after(row["state"], _before(row), changes)
    pending = sums["arrived"] + sums["reopened"]
    pending -= sums["confirmed"] + sums["discarded"] + sums["parked"]
    if pending <= 0:
        state = "resolved"  # its last message may have moved to another group
    elif state == "muted" and (row["muted_until"] is None or row["muted_until"] <= now):
        state = "new"
    return Group(
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
    db: Connection, found: Sequence[Group], more: dict[str, Unfolded], now: float
) -> list[Group]:
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
