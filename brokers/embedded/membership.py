"""Who owns which lane of a group: one owner each, fair shares, little movement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.brokers.balance import balance
from holdfast.ports import Lane

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping, Sequence

    from holdfast.clock import Clock

_JUMP = 0.1  # a step of the wall clock by this part of a session counts as a jump


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a member must do after it looked at its group."""

    generation: int
    acquired: dict[Lane, int]
    """Lanes that are now ours, with their ids."""
    surrender: frozenset[Lane]
    """Lanes of ours that somebody else should have: settle their work, then free them."""
    lost: frozenset[Lane]
    """Lanes that were ours and are not any more."""


class Membership:
    """One member's rows in its group; every method runs inside the caller's transaction."""

    def __init__(self, group: str, member: str, topics: Sequence[str], session: float) -> None:
        self.group = group
        self.member = member
        self.topics = frozenset(topics)
        self.session = session
        self._offset: float | None = None  # wall clock less monotonic, when last seen
        self._trust_from = float("-inf")

    def look(self, db: sqlite3.Connection, clock: Clock, mine: frozenset[Lane]) -> Verdict:
        """Stay alive, bury the dead, and take what is free and should be ours."""
        now = clock.now().timestamp()
        joined = self._stay(db, now)
        buried = self._bury(db, now, clock.monotonic())
        if joined or buried:
            self._bump(db)
        members = self._members(db)
        owners = self._owners(db, members)
        target = balance({lane: owner for lane, (_, owner) in owners.items()}, members)
        ours = {lane for lane, owner in target.items() if owner == self.member}
        held = {lane for lane, (_, owner) in owners.items() if owner == self.member}
        free = {lane for lane, (_, owner) in owners.items() if owner is None}
        acquired = {lane: owners[lane][0] for lane in (ours & free) | (held - mine)}
        self._take(db, acquired)
        return Verdict(
            generation=self._generation(db),
            acquired=acquired,
            surrender=frozenset(held & mine - ours),
            lost=mine - held,
        )

    def generation(self, rows: list[tuple[int]]) -> int:
        """Return the generation in *rows*, 0 for a group that nobody has joined."""
        return rows[0][0] if rows else 0

    def leave(self, db: sqlite3.Connection) -> None:
        """Go away at once; lanes must have been freed before."""
        db.execute("DELETE FROM hf_member WHERE grp = ? AND id = ?", (self.group, self.member))
        self._bump(db)

    def free(self, db: sqlite3.Connection, lane_id: int, epoch: int) -> None:
        """Give up a lane so that its next owner can take it."""
        db.execute(
            "UPDATE hf_cursor SET owner = NULL"
            " WHERE grp = ? AND lane = ? AND owner = ? AND epoch = ?",
            (self.group, lane_id, self.member, epoch),
        )
        self._bump(db)

    def _bury(self, db: sqlite3.Connection, now: float, monotonic: float) -> int:
        """Remove members whose time is up.

        When the wall clock has jumped, all times in the table are off until their members
        renew them, so nobody is buried for a session: a clock step is no crash.
        """
        offset = now - monotonic
        if self._offset is None or abs(offset - self._offset) > _JUMP * self.session:
            if self._offset is not None:
                self._trust_from = monotonic + self.session
            self._offset = offset
        if monotonic < self._trust_from:
            return 0
        return db.execute(
            "DELETE FROM hf_member WHERE grp = ? AND expires < ?", (self.group, now)
        ).rowcount

    def _stay(self, db: sqlite3.Connection, now: float) -> bool:
        renewed = db.execute(
            "UPDATE hf_member SET expires = ? WHERE grp = ? AND id = ?",
            (now + self.session, self.group, self.member),
        ).rowcount
        if renewed:
            return False
        db.execute(
            "INSERT INTO hf_member (grp, id, topics, expires) VALUES (?, ?, ?, ?)",
            (self.group, self.member, json.dumps(sorted(self.topics)), now + self.session),
        )
        # A late return: whatever this name still owns was given up with its membership.
        db.execute(
            "UPDATE hf_cursor SET owner = NULL WHERE grp = ? AND owner = ?",
            (self.group, self.member),
        )
        return True

    def _bump(self, db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO hf_group (name, generation) VALUES (?, 1)"
            " ON CONFLICT (name) DO UPDATE SET generation = generation + 1",
            (self.group,),
        )

    def _generation(self, db: sqlite3.Connection) -> int:
        return self.generation(
            db.execute("SELECT generation FROM hf_group WHERE name = ?", (self.group,)).fetchall()
        )

    def _members(self, db: sqlite3.Connection) -> dict[str, frozenset[str]]:
        rows = db.execute("SELECT id, topics FROM hf_member WHERE grp = ?", (self.group,))
        return {name: frozenset(json.loads(topics)) for name, topics in rows}

    def _owners(
        self, db: sqlite3.Connection, members: Mapping[str, frozenset[str]]
    ) -> dict[Lane, tuple[int, str | None]]:
        """Return each lane's id and its living owner."""
        topics = sorted(frozenset().union(*members.values()))
        rows = db.execute(
            "SELECT l.topic, l.partition, l.id, c.owner FROM hf_lane l"
            " LEFT JOIN hf_cursor c ON c.lane = l.id AND c.grp = ?"
            " WHERE l.topic IN (SELECT value FROM json_each(?))",
            (self.group, json.dumps(topics)),
        )
        return {
            Lane(topic, partition): (lane_id, owner if owner in members else None)
            for topic, partition, lane_id, owner in rows
        }

    def _take(self, db: sqlite3.Connection, lanes: Mapping[Lane, int]) -> None:
        # A new epoch for every new owner: whatever the last one still settles is ignored.
        db.executemany(
            "INSERT INTO hf_cursor (grp, lane, owner, epoch) VALUES (?, ?, ?, 1)"
            " ON CONFLICT (grp, lane) DO UPDATE SET owner = excluded.owner, epoch = epoch + 1",
            [(self.group, lane_id, self.member) for lane_id in lanes.values()],
        )
