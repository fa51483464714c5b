"""The lanes that one member owns, and how they come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.brokers.embedded.marks import Marks

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from holdfast.brokers.embedded.lane import LaneState
    from holdfast.brokers.embedded.membership import Membership, Verdict
    from holdfast.brokers.embedded.store import Session
    from holdfast.clock import Clock
    from holdfast.ports import Lane, Listener


class Ownership:
    """Keeps the membership alive and the listener informed; `lanes` is what is ours now."""

    def __init__(
        self, session: Session, membership: Membership, clock: Clock, listener: Listener | None
    ) -> None:
        self.lanes: dict[Lane, LaneState] = {}
        self.marks = Marks(membership.group, membership.member)
        self.membership = membership
        self._db = session
        self._clock = clock
        self._listener = listener
        self._generation = -1
        self._beat = float("-inf")

    def keep(self) -> None:
        """Renew the membership when it is time, and follow what changed in the group."""
        mono = self._clock.monotonic()
        beat_due = mono - self._beat >= self.membership.session / 3
        if not beat_due and self._current_generation() == self._generation:
            return
        verdict = self._look()
        self._beat = mono
        if verdict.surrender:
            self.give_up(verdict.surrender)
            self._look()

    def give_up(self, lanes: Collection[Lane]) -> None:
        """Let the listener settle, then put the rest back without blame and free the lanes."""
        if self._listener is not None and lanes:
            self._listener.revoked(sorted(lanes))
        with self._db.write() as db:
            for lane in lanes:
                state = self.lanes.pop(lane)
                if self.marks.owns(db, state):
                    self.put_back(db, state, list(state.flying), blame=0, due=0.0)
                    self.membership.free(db, state.id, state.epoch)

    def leave(self) -> None:
        """Give up everything and go."""
        self.give_up(list(self.lanes))
        with self._db.write() as db:
            self.membership.leave(db)

    def put_back(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        offsets: Collection[int],
        *,
        blame: int,
        due: float,
    ) -> None:
        """Note *offsets* as waiting to be handed out again, once *due*."""
        landed = [(o, state.land(o, due, blame)) for o in offsets]
        self.marks.wait(db, state, landed, self.offset())

    def reload(self, db: sqlite3.Connection, lane: Lane, lane_id: int) -> None:
        """Take the state of a lane of ours from the tables again."""
        self.lanes[lane] = self.marks.load(db, lane, lane_id, self.offset())

    def offset(self) -> float:
        """Return what turns a monotonic moment into wall-clock time, for the tables."""
        return self._clock.now().timestamp() - self._clock.monotonic()

    def _current_generation(self) -> int:
        rows = self._db.read(
            "SELECT generation FROM hf_group WHERE name = ?", self.membership.group
        )
        return int(rows[0][0]) if rows else 0

    def _look(self) -> Verdict:
        with self._db.write() as db:
            verdict = self.membership.look(db, self._clock, frozenset(self.lanes))
            states = [
                self.marks.load(db, lane, lane_id, self.offset())
                for lane, lane_id in verdict.acquired.items()
            ]
        self._generation = verdict.generation
        for lane in verdict.lost:
            del self.lanes[lane]
        if verdict.lost and self._listener is not None:
            self._listener.lost(sorted(verdict.lost))
        self.lanes.update({state.lane: state for state in states})
        if states and self._listener is not None:
            self._listener.assigned(sorted(state.lane for state in states))
        return verdict
