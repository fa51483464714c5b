"""A member of a group on the embedded broker.

Handing out the messages of owned lanes, in order, each noted in the tables first.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.embedded.cursor import CursorTable
from holdfast.brokers.embedded.lane import MASK, DelayedMessage, EmbeddedLane
from holdfast.brokers.groups.member import GroupMember
from holdfast.brokers.groups.source import GroupSource
from holdfast.errors import ConfigurationError, HoldfastError, StaleDelivery
from holdfast.ports import Delivery

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.embedded.cursor import Row
    from holdfast.brokers.embedded.group import EmbeddedGroup
    from holdfast.brokers.embedded.store import StoreSession
    from holdfast.clock import Clock
    from holdfast.ports import Caps, Lane, Listener, Position


_headers = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


class Handout:
    """Takes the next messages from the lanes in turn: what is due again, then what is new."""

    def __init__(
        self,
        session: StoreSession,
        group: EmbeddedGroup,
        lanes: Mapping[Lane, EmbeddedLane],
        clock: Clock,
        lease: float,
    ) -> None:
        self._db = session
        self._group = group
        self._lanes = lanes
        self._clock = clock
        self._lease = lease
        self._lease_until = 0.0
        self._receipt = 0
        self._turn = 0

    def batch(self, limit: int, paused: set[Lane]) -> list[Delivery]:
        """Return at most *limit* deliveries from the lanes that are not *paused*."""
        self._expire_leases()
        lanes = [s for s in self._lanes.values() if s.lane not in paused]
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
        self._lease_until = self._clock.monotonic() + self._lease
        try:
            # Need not be on disk: a power cut forgets at most that these were handed out.
            with self._db.write(durable=False) as db:
                for state in lanes:
                    if self._group.marks.owns(db, state):
                        self._take(db, state, limit, now, batch)
        except HoldfastError:
            for delivery in batch:  # not noted in the tables, so not handed out
                self._lanes[delivery.lane].land(int(delivery.position), 0.0)
            raise
        return batch

    def _ends(self, lanes: Sequence[EmbeddedLane]) -> dict[int, int]:
        marks = ",".join("?" * len(lanes))
        sql = f"SELECT id, next FROM hf_lane WHERE id IN ({marks})"  # noqa: S608 - marks only
        return dict(self._db.read(sql, *(s.id for s in lanes)))

    def _take(
        self,
        db: sqlite3.Connection,
        state: EmbeddedLane,
        limit: int,
        now: float,
        batch: list[Delivery],
    ) -> None:
        """Hand out what is due again, then what is new, and note both in the tables."""
        due = state.due(now, limit - len(batch))
        rows = self._group.marks.messages(db, state, due)
        batch += [self._launch(state, row, state.waiting.pop(row[0] & MASK)) for row in rows]
        self._group.marks.fly(db, state, due)
        if len(batch) < limit and not state.is_full:
            self._take_new(db, state, limit - len(batch), batch)

    def _take_new(
        self,
        db: sqlite3.Connection,
        state: EmbeddedLane,
        limit: int,
        batch: list[Delivery],
    ) -> None:
        rows = self._group.marks.fresh(db, state, limit)
        if not rows:
            return
        blocked = state.held_keys()
        behind = []
        for row in rows:
            offset = row[0] & MASK
            held = DelayedMessage(row[1])
            if blocked and row[1] in blocked:
                state.waiting[offset] = held
                behind.append((offset, held))
            else:
                batch.append(self._launch(state, row, held))
        state.fetched = (rows[-1][0] & MASK) + 1
        self._group.marks.advance(db, state)
        self._group.marks.wait(db, state, behind, self._group.offset())

    def _launch(self, state: EmbeddedLane, row: Row, held: DelayedMessage) -> Delivery:
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
                behind = state.behind(expired)
                with self._db.write() as db:
                    if self._group.marks.owns(db, state):
                        self._group.put_back(db, state, expired, blame=1, due=0.0)
                        self._group.put_back(db, state, behind, blame=0, due=0.0)


class EmbeddedSource(GroupSource[EmbeddedLane]):
    """Hands out the messages of the lanes it owns, and settles them one by one.

    A member that does not poll for *session* seconds is taken for dead: its lanes go to
    others, and what it held counts as a failure of each of those messages.
    """

    def __init__(
        self,
        session: StoreSession,
        group: EmbeddedGroup,
        caps: Caps,
        clock: Clock,
        listener: Listener | None,
    ) -> None:
        self._membership = GroupMember(group, clock, listener)
        super().__init__(self._membership)
        self.caps = caps
        self._db = session
        self._clock = clock
        self._group = group
        self._handout = Handout(session, group, self._lanes, clock, caps.lease or 0.0)
        self._woken = threading.Event()
        self._wake_asked = False

    @property
    def member(self) -> str:
        """The name of this member in its group."""
        return self._group.member

    def die(self) -> None:
        """Vanish without a word, as a killed process does."""
        self._is_closed = True
        self._db.close()

    # -- handing out -----------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, due ones first, each lane in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        while True:
            self._woken.clear()
            self._membership.keep()
            if batch := self._handout.batch(limit, self._paused):
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
        moments = [self._group.session / 3]
        for state in self._lanes.values():
            due, expiry = state.next_due(), state.next_expiry()
            if due is not None and state.lane not in self._paused:
                moments.append(max(due - now, 0.001))
            if expiry is not None:
                moments.append(max(expiry - now, 0.001))
        return min(moments)

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
                if self._group.marks.owns(db, state):
                    self._group.marks.settle(db, state)
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
            if self._group.marks.owns(db, state):
                self._group.put_back(db, state, [int(delivery.position)], blame=int(blame), due=due)

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Lengthen the lease of *delivery* to *seconds* from now."""
        self._open()
        state = self._owner(delivery)
        if state is None:
            raise StaleDelivery(f"{delivery.lane} {delivery.position} is not held here any more")
        until = self._clock.monotonic() + seconds
        state.flying[int(delivery.position)].lease_until = until
        delivery.lease_until = until

    def _owner(self, delivery: Delivery) -> EmbeddedLane | None:
        """Return the lane that still holds this very delivery, or None if it is stale."""
        state = self._lanes.get(delivery.lane)
        if state is None or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(int(delivery.position))
        return state if held is not None and held.receipt == delivery.receipt else None

    # -- the group -------------------------------------------------------------------

    def lag(self) -> Mapping[Lane, int]:
        """Return the unsettled messages of each owned lane."""
        counts = dict(self._db.read(CursorTable.LAG, self._group.group))
        return {lane: counts.get(state.id, 0) for lane, state in self._lanes.items()}

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale."""
        self._open()
        state = self._sought(lane, offset, time)
        with self._db.write() as db:
            end = self._group.marks.end(db, state)
            if time is not None:
                offset = self._group.marks.at_time(db, state, time.timestamp(), end)
            if not isinstance(offset, int) or not 0 <= offset <= end:
                raise ConfigurationError(f"cannot seek to offset {offset!r}: use 0 to {end}")
            self._group.marks.move(db, state, offset)
            self._lanes[lane] = self._group.load(db, lane, state.id)

    def close(self) -> None:
        """Leave the group at once; its lanes are free for others when this returns."""
        if self._is_closed:
            return
        try:
            self._membership.leave()
        finally:
            self._is_closed = True
            self._db.close()
