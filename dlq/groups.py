"""What an operator can see and say about failure groups: problems instead of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut, plain
from holdfast.dlq.audit import Audit, Warrant
from holdfast.dlq.figures import Unfolded, snapshot, unfolded
from holdfast.dlq.group import EVERY_OPEN, STATES, Group, Which, adorned, read_groups
from holdfast.dlq.schema import group
from holdfast.dlq.tally import fold
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy.engine import Connection, Engine

__all__ = [
    "EVERY_OPEN", "STATES", "AlreadyOver", "Group", "Groups", "NoSuchGroup", "StillOpen", "Which",
]  # fmt: skip


class NoSuchGroup(ConfigurationError):
    """No failure group, or more than one, answers to the name."""


class AlreadyOver(ConfigurationError):
    """The group has no pending message: there is nothing to look after."""


class StillOpen(ConfigurationError):
    """The group has messages that are neither confirmed, discarded nor parked."""


class Groups:
    """What an operator can see and say about failure groups; each act is audited."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def listed(self, which: Which = EVERY_OPEN, *, limit: int = 100) -> list[Group]:
        """Return the groups, the most urgent first; exact, whether or not changes were folded.

        First what nobody looks after, then what somebody does, then what is muted or over;
        among those the largest.
        """
        now = self._clock.now().timestamp()
        with snapshot(self._engine) as db:
            more = unfolded(db)
            found = self.as_of(db, more, which)[:limit]
            return adorned(db, found, more, now)

    def figures(self, which: Which = EVERY_OPEN, *, limit: int | None = 100) -> list[Group]:
        """Return the same without trend, keys, tenants and versions; with no *limit*, all."""
        with snapshot(self._engine) as db:
            return self.as_of(db, unfolded(db), which)[:limit]

    def as_of(
        self, db: Connection, more: dict[str, Unfolded], which: Which = EVERY_OPEN
    ) -> list[Group]:
        """Return them all, as of the snapshot that *db* sees."""
        now = self._clock.now().timestamp()
        rows = db.execute(select(group).where(*which.where(more))).mappings().all()
        read = zip(rows, read_groups(db, rows, more, now), strict=True)
        # A group that was moved rests, unless a process of the old version still adds to it.
        found = [one for row, one in read if row["moved_to"] is None or one.pending]
        found = [one for one in found if one.state in which.states]
        found.sort(key=_urgency)
        return found

    def find(self, name: str) -> Group:
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

    def acknowledge(self, name: str, warrant: Warrant, *, owner: str | None = None) -> Group:
        """Say that somebody looks after the group; refused when nothing of it is pending."""
        values: dict[str, Any] = {"state": "acknowledged", "owner": cut(owner or warrant.actor)}
        return self._act(name, warrant, "acknowledge", values, _require_open)

    def mute(self, name: str, warrant: Warrant, *, until: datetime) -> Group:
        """Keep the group out of alerts *until* then; it counts on, and is told again then."""
        seconds = until.timestamp()
        if seconds <= self._clock.now().timestamp():
            raise ConfigurationError(f"muting until {until.isoformat()}: name a moment to come")
        values = {"state": "muted", "muted_until": seconds, "alerted_at": None}
        return self._act(name, warrant, "mute", values, _require_open)

    def annotate(self, name: str, warrant: Warrant, *, note: str) -> Group:
        """Keep a note with the group, for whoever looks next."""
        return self._act(name, warrant, "note", {"note": plain(note)})

    def resolve(self, name: str, warrant: Warrant) -> Group:
        """Say that the problem is over; refused while a message of it is pending."""
        return self._act(name, warrant, "resolve", {"state": "resolved"}, _require_over)

    def _act(
        self,
        name: str,
        warrant: Warrant,
        action: str,
        values: dict[str, Any],
        check: Callable[[Group], None] = lambda _: None,
    ) -> Group:
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
            self._audit.append(db, warrant, action, found.group_id, kept)

        committed(self._engine, work, clock=self._clock)
        return self.find(found.group_id)


_TURN = {"regressed": 0, "new": 0, "acknowledged": 1, "muted": 2, "resolved": 3}


def _urgency(one: Group) -> tuple[int, int, float, str]:
    return _TURN[one.state], -one.pending, -one.last_seen, one.group_id


_SAID = ("state", "owner", "muted_until")


def _require_open(found: Group) -> None:
    """Refuse what would hide a recurrence: a problem that is over must be able to return."""
    if not found.pending:
        raise AlreadyOver(
            f"group {found.group_id} has nothing pending, it is {found.state}: should it "
            "return, it is told as regressed"
        )


def _require_over(found: Group) -> None:
    if found.pending:
        raise StillOpen(
            f"group {found.group_id} has {found.pending} pending messages: replay them, or "
            f"discard or park them with a reason"
        )
