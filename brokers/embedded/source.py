"""A member of a group on the embedded broker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.embedded.lane import MASK, Held, LaneState
from holdfast.brokers.embedded.marks import Marks, Row
from holdfast.errors import ConfigurationError, HoldfastError, StaleDelivery, Unsupported
from holdfast.ports import Delivery, Lane

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.embedded.membership import Membership, Verdict
    from holdfast.brokers.embedded.store import Session
    from holdfast.caps import Caps
    from holdfast.clock import Clock
    from holdfast.ports import Listener, Position

_MOST_WAITING = 10_000  # per lane; beyond it the lane hands out nothing new
_headers = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


class EmbeddedSource:
    """Hands out the messages of the lanes it owns, and settles them one by one.

    A member that does not poll for *session* seconds is taken for dead: its lanes go to
    others, and what it held counts as a failure of each of those messages.
    """

    def __init__(
        self,
        session: Session,
        membership: Membership,
        caps: Caps,
        clock: Clock,
        listener: Listener | None,
    ) -> None:
        self.caps = caps
        self._db = session
        self._membership = membership
        self._clock = clock
        self._listener = listener
        self._marks = Marks(membership.group, membership.member)
        self._lanes: dict[Lane, LaneState] = {}
        self._paused: set[Lane] = set()
        self._woken = threading.Event()
        self._receipt = 0
        self._generation = -1
        self._beat = float("-inf")
        self._turn = 0
        self._lease_until = 0.0
        self._wake_asked = False
        self._closed = False

    @property
    def member(self) -> str:
        """The name of this member in its group."""
        return self._membership.member

    def die(self) -> None:
        """Vanish without a word, as a killed process does."""
        self._closed = True
        self._db.close()

    # -- handing out -----------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, due ones first, each lane in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        while True:
            self._woken.clear()
            self._keep_membership()
            if batch := self._hand_out(limit):
                return batch
            left = until - self._clock.monotonic()
            if left <= 0 or self._wake_asked:
                self._wake_asked = False
                return []
            self._db.wait(self._woken, min(left, self._patience()))

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._wake_asked = True
        self._woken.set()

    def _patience(self) -> float:
        """Return how long nothing can happen unless somebody commits."""
        now = self._clock.monotonic()
        moments = [self._membership.session / 3]
        for state in self._lanes.values():
            due, expiry = state.next_due(), state.next_expiry()
            if due is not None and state.lane not in self._paused:
                moments.append(max(due - now, 0.001))
            if expiry is not None:
                moments.append(max(expiry - now, 0.001))
        return min(moments)

    def _hand_out(self, limit: int) -> list[Delivery]:
        self._expire_leases()
        lanes = [s for s in self._lanes.values() if s.lane not in self._paused]
        if not lanes:
            return []
        self._turn = (self._turn + 1) % len(lanes)
        lanes = lanes[self._turn :] + lanes[: self._turn]
        ends = self._ends(lanes)
        now = self._clock.monotonic()
        if not any(ends[s.id] > s.fetched or s.due(now, 1) for s in lanes):
            return []  # without taking the write lock: idle members do not disturb writers
        batch: list[Delivery] = []
        self._receipt += 1  # one for the whole batch: a message is in it once at most
        self._lease_until = self._clock.monotonic() + (self.caps.lease or 0.0)
        try:
            # Need not be on disk: a power cut forgets at most that these were handed out.
            with self._db.write(durable=False) as db:
                for state in lanes:
                    if self._marks.owns(db, state):
                        self._take(db, state, limit, now, batch)
        except HoldfastError:
            for delivery in batch:  # not noted in the tables, so not handed out
                self._lanes[delivery.lane].land(int(delivery.position), 0.0)
            raise
        return batch

    def _ends(self, lanes: Sequence[LaneState]) -> dict[int, int]:
        marks = ",".join("?" * len(lanes))
        sql = f"SELECT id, next FROM hf_lane WHERE id IN ({marks})"  # noqa: S608 - marks only
        return dict(self._db.read(sql, *(s.id for s in lanes)))

    def _take(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        limit: int,
        now: float,
        batch: list[Delivery],
    ) -> None:
        """Hand out what is due again, then what is new, and note both in the tables."""
        due = state.due(now, limit - len(batch))
        rows = self._marks.messages(db, state, due)
        batch += [self._launch(state, row, state.waiting.pop(row[0] & MASK)) for row in rows]
        self._marks.fly(db, state, due)
        if len(batch) < limit and len(state.waiting) < _MOST_WAITING:
            self._take_new(db, state, limit - len(batch), now, batch)

    def _take_new(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        limit: int,
        now: float,
        batch: list[Delivery],
    ) -> None:
        rows = self._marks.fresh(db, state, limit)
        if not rows:
            return
        blocked = state.held_keys(now)
        behind = []
        for row in rows:
            offset = row[0] & MASK
            held = Held(row[1])
            if blocked and row[1] in blocked:
                state.waiting[offset] = held
                behind.append((offset, held))
            else:
                batch.append(self._launch(state, row, held))
        state.fetched = (rows[-1][0] & MASK) + 1
        self._marks.advance(db, state)
        self._marks.wait(db, state, behind, self._offset())

    def _launch(self, state: LaneState, row: Row, held: Held) -> Delivery:
        message_id, key, headers, body, stored = row
        offset = message_id & MASK
        state.flying[offset] = held
        held.receipt, held.lease_until = self._receipt, self._lease_until
        return Delivery(
            lane=state.lane,
            position=offset,
            key=key,
            body=body,
            headers=_headers(headers),
            timestamp=stored,
            count=held.failures + 1,
            epoch=state.epoch,
            lease_until=self._lease_until,
            receipt=self._receipt,
        )

    def _expire_leases(self) -> None:
        mono = self._clock.monotonic()
        for state in self._lanes.values():
            if expired := state.expired(mono):
                with self._db.write() as db:
                    if self._marks.owns(db, state):
                        self._put_back(db, state, expired, blame=1, due=0.0)

    # -- settling --------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* for good; durable when this returns."""
        self._open()
        for delivery in deliveries:
            state = self._lanes.get(delivery.lane)
            if state is None or state.epoch != delivery.epoch:
                continue
            offset: int = delivery.position  # type: ignore[assignment]
            held = state.flying.get(offset)
            if held is not None and held.receipt == delivery.receipt:
                del state.flying[offset]
                state.unsaved.append(offset)
        self.flush()

    def flush(self) -> None:
        """Store what is settled and not yet in the tables, after a failed `accept` say."""
        unsaved = [state for state in self._lanes.values() if state.unsaved]
        if not unsaved:
            return
        with self._db.write() as db:
            for state in unsaved:
                if self._marks.owns(db, state):
                    self._marks.settle(db, state)
        for state in unsaved:
            state.unsaved.clear()

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused: this broker keeps no dead letters of its own."""
        self.accept([delivery])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again after *delay*; its key's later messages wait behind it."""
        self._open()
        state = self._owner(delivery)
        if state is None:
            return
        if delay is not None and not delay >= 0:
            raise ConfigurationError(f"release(delay={delay}): use 0 or more seconds, or None")
        due = 0.0 if delay is None else self._clock.monotonic() + delay
        with self._db.write() as db:
            if self._marks.owns(db, state):
                self._put_back(db, state, [int(delivery.position)], blame=int(blame), due=due)

    def _put_back(
        self,
        db: sqlite3.Connection,
        state: LaneState,
        offsets: list[int],
        *,
        blame: int,
        due: float,
    ) -> None:
        landed = [(o, state.land(o, due, blame)) for o in offsets]
        self._marks.wait(db, state, landed, self._offset())

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Lengthen the lease of *delivery* to *seconds* from now."""
        self._open()
        state = self._owner(delivery)
        if state is None:
            raise StaleDelivery(f"{delivery.lane} {delivery.position} is not held here any more")
        until = self._clock.monotonic() + seconds
        state.flying[int(delivery.position)].lease_until = until
        delivery.lease_until = until

    def _owner(self, delivery: Delivery) -> LaneState | None:
        """Return the lane that still holds this very delivery, or None if it is stale."""
        state = self._lanes.get(delivery.lane)
        if state is None or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(int(delivery.position))
        return state if held is not None and held.receipt == delivery.receipt else None

    # -- the group -------------------------------------------------------------------

    def _keep_membership(self) -> None:
        mono = self._clock.monotonic()
        beat_due = mono - self._beat >= self._membership.session / 3
        if not beat_due and self._current_generation() == self._generation:
            return
        verdict = self._look()
        self._beat = mono
        if verdict.surrender:
            self._give_up(verdict.surrender)
            self._look()

    def _current_generation(self) -> int:
        rows = self._db.read(
            "SELECT generation FROM hf_group WHERE name = ?", self._membership.group
        )
        return int(rows[0][0]) if rows else 0

    def _look(self) -> Verdict:
        with self._db.write() as db:
            verdict = self._membership.look(db, self._clock, frozenset(self._lanes))
            states = [
                self._marks.load(db, lane, lane_id, self._offset())
                for lane, lane_id in verdict.acquired.items()
            ]
        self._generation = verdict.generation
        for lane in verdict.lost:
            del self._lanes[lane]
        if verdict.lost and self._listener is not None:
            self._listener.lost(sorted(verdict.lost))
        self._lanes.update({state.lane: state for state in states})
        if states and self._listener is not None:
            self._listener.assigned(sorted(state.lane for state in states))
        return verdict

    def _give_up(self, lanes: Collection[Lane]) -> None:
        """Let the listener settle, then put the rest back without blame and free the lanes."""
        if self._listener is not None and lanes:
            self._listener.revoked(sorted(lanes))
        with self._db.write() as db:
            for lane in lanes:
                state = self._lanes.pop(lane)
                if self._marks.owns(db, state):
                    self._put_back(db, state, list(state.flying), blame=0, due=0.0)
                    self._membership.free(db, state.id, state.epoch)

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Hand out nothing from *lanes*, whoever assigns them anew."""
        self._paused.update(lanes)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Hand out from *lanes* again."""
        self._paused.difference_update(lanes)

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes owned now."""
        return frozenset(self._lanes)

    def lag(self) -> Mapping[Lane, int]:
        """Return the unsettled messages of each owned lane."""
        counts = dict(self._db.read(Marks.LAG, self._membership.group))
        return {lane: counts.get(state.id, 0) for lane, state in self._lanes.items()}

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale."""
        self._open()
        state = self._lanes.get(lane)
        if state is None:
            raise ConfigurationError(
                f"cannot seek in {lane}: it is not assigned to this member; owned now: "
                f"{sorted(self._lanes) or 'nothing, poll first'}"
            )
        if (offset is None) == (time is None):
            raise ConfigurationError("seek takes either offset= or time=, one of them")
        with self._db.write() as db:
            end = self._marks.end(db, state)
            if time is not None:
                offset = self._marks.at_time(db, state, time.timestamp(), end)
            if not isinstance(offset, int) or not 0 <= offset <= end:
                raise ConfigurationError(f"cannot seek to offset {offset!r}: use 0 to {end}")
            self._marks.move(db, state, offset)
            self._lanes[lane] = self._marks.load(db, lane, state.id, self._offset())

    def close(self) -> None:
        """Leave the group at once; its lanes are free for others when this returns."""
        if self._closed:
            return
        try:
            self._give_up(list(self._lanes))
            with self._db.write() as db:
                self._membership.leave(db)
        finally:
            self._closed = True
            self._db.close()

    def _offset(self) -> float:
        """Return what turns a monotonic moment into wall-clock time, for the tables."""
        return self._clock.now().timestamp() - self._clock.monotonic()

    def _open(self) -> None:
        if self._closed:
            raise Unsupported("be used after close()", "this source", "make a new one")
