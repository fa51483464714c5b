"""A member of a group on the embedded broker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.brokers.embedded.handout import Handout
from holdfast.brokers.embedded.marks import Marks
from holdfast.brokers.embedded.ownership import Ownership
from holdfast.errors import ConfigurationError, StaleDelivery, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.embedded.lane import LaneState
    from holdfast.brokers.embedded.membership import Membership
    from holdfast.brokers.embedded.store import Session
    from holdfast.caps import Caps
    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane, Listener, Position


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
        self._clock = clock
        self._own = Ownership(session, membership, clock, listener)
        self._handout = Handout(session, self._own, clock, caps.lease or 0.0)
        self._paused: set[Lane] = set()
        self._woken = threading.Event()
        self._wake_asked = False
        self._closed = False

    @property
    def member(self) -> str:
        """The name of this member in its group."""
        return self._own.membership.member

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
            self._own.keep()
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
        moments = [self._own.membership.session / 3]
        for state in self._own.lanes.values():
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
            state = self._own.lanes.get(delivery.lane)
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
        unsaved = [state for state in self._own.lanes.values() if state.unsaved]
        if not unsaved:
            return
        with self._db.write() as db:
            for state in unsaved:
                if self._own.marks.owns(db, state):
                    self._own.marks.settle(db, state)
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
            if self._own.marks.owns(db, state):
                self._own.put_back(db, state, [int(delivery.position)], blame=int(blame), due=due)

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
        state = self._own.lanes.get(delivery.lane)
        if state is None or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(int(delivery.position))
        return state if held is not None and held.receipt == delivery.receipt else None

    # -- the group -------------------------------------------------------------------

    def pause(self, lanes: Iterable[Lane]) -> None:
        """Hand out nothing from *lanes*, whoever assigns them anew."""
        self._paused.update(lanes)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Hand out from *lanes* again."""
        self._paused.difference_update(lanes)

    def assignment(self) -> frozenset[Lane]:
        """Return the lanes owned now."""
        return frozenset(self._own.lanes)

    def lag(self) -> Mapping[Lane, int]:
        """Return the unsettled messages of each owned lane."""
        counts = dict(self._db.read(Marks.LAG, self._own.membership.group))
        return {lane: counts.get(state.id, 0) for lane, state in self._own.lanes.items()}

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale."""
        self._open()
        state = self._own.lanes.get(lane)
        if state is None:
            raise ConfigurationError(
                f"cannot seek in {lane}: it is not assigned to this member; owned now: "
                f"{sorted(self._own.lanes) or 'nothing, poll first'}"
            )
        if (offset is None) == (time is None):
            raise ConfigurationError("seek takes either offset= or time=, one of them")
        with self._db.write() as db:
            end = self._own.marks.end(db, state)
            if time is not None:
                offset = self._own.marks.at_time(db, state, time.timestamp(), end)
            if not isinstance(offset, int) or not 0 <= offset <= end:
                raise ConfigurationError(f"cannot seek to offset {offset!r}: use 0 to {end}")
            self._own.marks.move(db, state, offset)
            self._own.reload(db, lane, state.id)

    def close(self) -> None:
        """Leave the group at once; its lanes are free for others when this returns."""
        if self._closed:
            return
        try:
            self._own.leave()
        finally:
            self._closed = True
            self._db.close()

    def _open(self) -> None:
        if self._closed:
            raise Unsupported("be used after close()", "this source", "make a new one")
