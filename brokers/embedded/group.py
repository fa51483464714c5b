"""A group in the tables: one owner a lane, fair shares, little movement."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast.brokers.embedded.cursor import CursorTable
from holdfast.brokers.groups.assignment import decide
from holdfast.brokers.groups.member import GroupChange
from holdfast.ports import Lane

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.brokers.embedded.lane import EmbeddedLane
    from holdfast.brokers.embedded.store import StoreSession
    from holdfast.brokers.groups.member import Subscription
    from holdfast.clock import Clock

_JUMP = 0.1  # a step of the wall clock by this part of a session counts as a jump


class EmbeddedGroup:
    """One member's rows in its group; every step is one transaction."""

    def __init__(self, db: StoreSession, subscription: Subscription, clock: Clock) -> None:
        self.group = subscription.group
        self.member = subscription.member
        self.session = subscription.session
        self.marks = CursorTable(self.group, self.member)
        self._topics = json.dumps(sorted(set(subscription.topics)))
        self._db = db
        self._clock = clock
        self._generation = -1
        self._offset: float | None = None  # wall clock less monotonic, when last seen
        self._trust_from = float("-inf")

    # -- the store of a group ----------------------------------------------------------

    def has_news(self) -> bool:
        """Whether anybody came, went or freed a lane since the last look."""
        rows = self._db.read("SELECT generation FROM hf_group WHERE name = ?", self.group)
        return _generation(rows) != self._generation

    def look(self, mine: Mapping[Lane, EmbeddedLane]) -> GroupChange[EmbeddedLane]:
        """Stay alive, bury the dead, and take and load what is free and should be ours."""
        with self._db.write() as db:
            now = self._clock.now().timestamp()
            joined = self._stay(db, now)
            buried = self._bury(db, now, self._clock.monotonic())
            if joined or buried:
                self._bump(db)
            members = self._members(db)
            lanes = self._owners(db, members)
            owners = {lane: owner for lane, (_, owner) in lanes.items()}
            decision = decide(self.member, mine, owners, members)
            ids = {lane: lanes[lane][0] for lane in decision.take}
            self._take(db, ids.values())
            acquired = {lane: self.load(db, lane, lane_id) for lane, lane_id in ids.items()}
            query = "SELECT generation FROM hf_group WHERE name = ?"
            generation = _generation(db.execute(query, (self.group,)).fetchall())
        self._generation = generation
        return GroupChange(acquired=acquired, surplus=decision.surplus, lost=decision.lost)

    def enter(self, lane: Lane, claim: EmbeddedLane) -> EmbeddedLane:
        """Return the state as it was loaded, in the transaction that took the lane."""
        del lane
        return claim

    def forget(self, states: Collection[EmbeddedLane]) -> None:
        """Hold nothing but the states themselves."""

    def free(self, states: Collection[EmbeddedLane]) -> None:
        """Put back what is not settled, without blame; the next owner can take the lanes."""
        with self._db.write() as db:
            self._free(db, states)

    def leave(self, states: Collection[EmbeddedLane]) -> None:
        """Free the lanes and go away at once."""
        with self._db.write() as db:
            self._free(db, states)
            db.execute("DELETE FROM hf_member WHERE grp = ? AND id = ?", (self.group, self.member))
            self._bump(db)

    # -- lanes of ours -------------------------------------------------------------------

    def load(self, db: sqlite3.Connection, lane: Lane, lane_id: int) -> EmbeddedLane:
        """Return the state of a lane of ours as the tables have it."""
        return self.marks.load(db, lane, lane_id, self.offset())

    def put_back(
        self,
        db: sqlite3.Connection,
        state: EmbeddedLane,
        offsets: Collection[int],
        *,
        blame: int,
        due: float,
    ) -> None:
        """Note *offsets* as waiting to be handed out again, once *due*."""
        landed = [(o, state.land(o, due, blame)) for o in offsets]
        self.marks.wait(db, state, landed, self.offset())

    def offset(self) -> float:
        """Return what turns a monotonic moment into wall-clock time, for the tables."""
        return self._clock.now().timestamp() - self._clock.monotonic()

    # -- the steps -----------------------------------------------------------------------

    def _free(self, db: sqlite3.Connection, states: Collection[EmbeddedLane]) -> None:
        for state in states:
            if self.marks.owns(db, state):
                self.put_back(db, state, list(state.flying), blame=0, due=0.0)
                db.execute(
                    "UPDATE hf_cursor SET owner = NULL"
                    " WHERE grp = ? AND lane = ? AND owner = ? AND epoch = ?",
                    (self.group, state.id, self.member, state.epoch),
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
            (self.group, self.member, self._topics, now + self.session),
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

    def _take(self, db: sqlite3.Connection, lane_ids: Collection[int]) -> None:
        # A new epoch for every new owner: whatever the last one still settles is ignored.
        db.executemany(
            "INSERT INTO hf_cursor (grp, lane, owner, epoch) VALUES (?, ?, ?, 1)"
            " ON CONFLICT (grp, lane) DO UPDATE SET owner = excluded.owner, epoch = epoch + 1",
            [(self.group, lane_id, self.member) for lane_id in lane_ids],
        )


def _generation(rows: Sequence[tuple[int]]) -> int:
    """Return the generation in *rows*, 0 for a group that nobody has joined."""
    return int(rows[0][0]) if rows else 0
