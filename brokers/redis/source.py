"""A member of a group on Redis."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

from holdfast.brokers.redis.dispenser import Dispenser
from holdfast.brokers.redis.lane import LaneState, before
from holdfast.brokers.redis.link import log
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.redis.doorbell import Doorbell
    from holdfast.brokers.redis.ledger import Ledger
    from holdfast.brokers.redis.link import Link
    from holdfast.brokers.redis.membership import Membership
    from holdfast.caps import Caps
    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane, Listener

_FOREVER = 1e9


class RedisSource:
    """Hands out the messages of the lanes it owns, and settles them one by one.

    A member that does not poll for *session* seconds is taken for dead: its lanes go to
    others, and what it held counts as a failure of each of those messages.
    """

    def __init__(
        self,
        link: Link,
        membership: Membership,
        ledger: Ledger,
        doorbell: Doorbell,
        caps: Caps,
        clock: Clock,
        listener: Listener | None,
    ) -> None:
        self.caps = caps
        self._link = link
        self._membership = membership
        self._ledger = ledger
        self._dispenser = Dispenser(ledger, clock)
        self._doorbell = doorbell
        self._clock = clock
        self._listener = listener
        self._lanes: dict[Lane, LaneState] = {}
        self._leaving: dict[Lane, LaneState] = {}
        self._paused: set[Lane] = set()
        self._looked = float("-inf")
        self._connected = 0
        self._is_in_doubt = False
        self._is_closed = False

    # -- handing out ---------------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, due ones first, each lane in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        self._rest(timeout)
        while True:
            self._keep_membership()
            if batch := self._hand_out(limit):
                return batch
            left = until - self._clock.monotonic()
            if left <= 0:
                return []
            if not self._dispenser.is_rung and self._wait(left):
                return self._hand_out(limit)

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        self._doorbell.ring()

    def _rest(self, timeout: float) -> None:
        """Spend the time until the server may be asked again, if it did not answer last."""
        pause = self._link.pause
        if pause > 0:
            self._doorbell.rest(min(pause, timeout))
            if self._link.pause > 0:
                raise BrokerDown(f"{self._link.name} did not answer; trying again soon")

    def _wait(self, left: float) -> bool:
        now = self._clock.monotonic()
        moments = [left, self._looked + self._membership.session / 3 - now]
        streams = {self._membership.keys.bell: self._dispenser.rung}
        for state in self._readable():
            due = state.next_due()
            if due is not None:
                moments.append(due - now)
            if not state.is_full:
                streams[state.keys.stream] = state.last
        return self._doorbell.wait(streams, max(0.0, min(moments)))

    def _readable(self) -> list[LaneState]:
        return [state for state in self._lanes.values() if state.lane not in self._paused]

    def _hand_out(self, limit: int) -> list[Delivery]:
        try:
            return self._dispenser.hand_out(self._readable(), limit)
        except HoldfastError:
            self._is_in_doubt = True  # something may have been read that never arrived
            raise

    # -- settling ------------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries* for good; stored by the server when this returns."""
        self._open()
        settled: dict[str, list[str]] = {}
        lanes: dict[Lane, LaneState] = {}
        for delivery in deliveries:
            if (state := self._owner(delivery)) is not None:
                lanes[state.lane] = state
                settled.setdefault(state.keys.stream, []).append(str(delivery.position))
        if not lanes:
            return
        self._ledger.accept(settled, lanes.values())
        for state in lanes.values():
            for position in settled[state.keys.stream]:
                state.flying.pop(position, None)

    def flush(self) -> None:
        """Nothing is held back: what was settled is stored already."""
        self._open()

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused: Redis keeps no dead letters of its own."""
        self.accept([delivery])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again after *delay*; its key's later messages wait behind it."""
        self._open()
        state = self._owner(delivery)
        if state is None:
            return
        position, count = str(delivery.position), (delivery.count or 1) + blame
        wait = 0.0 if delay is None else min(max(delay, 0.0), _FOREVER)
        due = self._clock.monotonic() + wait
        self._ledger.park(state, {position: count}, wait)
        state.land(position, due if wait else 0.0, count)

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Refuse: a delivery has no lease, it stays with its owner."""
        del delivery, seconds
        raise Unsupported("extend a delivery", self._link.name, "it stays until it is settled")

    def _owner(self, delivery: Delivery) -> LaneState | None:
        """Return the lane that still holds this very delivery, or None if it is stale."""
        state = self._lanes.get(delivery.lane)
        if state is None or state.epoch != delivery.epoch:
            return None
        held = state.flying.get(str(delivery.position))
        return state if held is not None and held.receipt == delivery.receipt else None

    # -- the group -----------------------------------------------------------------------

    def _keep_membership(self) -> None:
        now = self._clock.monotonic()
        is_due = now - self._looked >= self._membership.session / 3
        if is_due or self._dispenser.is_rung or self._connected != self._link.connected:
            known = self._connected
            self._part()
            if surrender := self._look():
                self._give_up(surrender)
                self._look()
            self._looked = now
            # A server that crashed may have forgotten what it did last.
            self._is_in_doubt |= self._connected != known
        if self._is_in_doubt:
            for state in self._lanes.values():
                self._ledger.load(state, blame=False)
            self._is_in_doubt = False

    def _look(self) -> frozenset[Lane]:
        """Bring the lanes up to date; return those that somebody else should have."""
        verdict = self._membership.look(self._lanes, self._clock.monotonic())
        self._connected = self._link.connected
        self._dispenser.is_rung = False
        self._dispenser.rung = verdict.rung
        for lane in verdict.lost:
            del self._lanes[lane]
        if verdict.lost and self._listener is not None:
            self._listener.lost(sorted(verdict.lost))
        for state in verdict.acquired:
            self._ledger.load(state, blame=True)
        self._lanes.update({state.lane: state for state in verdict.acquired})
        if verdict.acquired and self._listener is not None:
            self._listener.assigned(sorted(state.lane for state in verdict.acquired))
        return verdict.surrender

    def _give_up(self, lanes: Iterable[Lane]) -> None:
        """Let the listener settle, then put the rest back without blame and free the lanes."""
        lanes = sorted(lanes)
        if lanes and self._listener is not None:
            self._listener.revoked(lanes)
        self._leaving.update({lane: self._lanes.pop(lane) for lane in lanes})
        self._part()

    def _part(self) -> None:
        """Free the lanes that were given up, those included that an outage kept from it."""
        if not self._leaving:
            return
        commands = []
        for state in self._leaving.values():
            held = {position: d.count or 1 for position, d in state.flying.items()}
            commands += self._ledger.parking(state, held)
            commands.append(self._membership.parting(state))
        self._link.calls([*commands, self._membership.ring()])
        self._leaving.clear()

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
        return self._ledger.lags(list(self._lanes))

    def seek(
        self, lane: Lane, *, offset: int | str | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale.

        *offset* is a position, or milliseconds since 1970 alone as in Redis itself; 0 is the
        beginning.
        """
        self._open()
        state = self._lanes.get(lane)
        if state is None:
            raise ConfigurationError(
                f"cannot seek in {lane}: it is not assigned to this member; owned now: "
                f"{sorted(self._lanes) or 'nothing, poll first'}"
            )
        if (offset is None) == (time is None):
            raise ConfigurationError("seek takes either offset= or time=, one of them")
        last = _just_before(offset if time is None else floor(time.timestamp() * 1000))
        if epoch := self._ledger.seek(state, last):
            self._lanes[lane] = LaneState(lane, state.keys, epoch, state.member, last)

    def close(self) -> None:
        """Leave the group at once; its lanes are free for others when this returns."""
        if self._is_closed:
            return
        try:
            self._give_up(self._lanes)
            if self._connected:
                self._membership.leave()
        except BrokerDown as error:
            log.warning("%s; this member's lanes are free when its session ends", error)
        finally:
            self._is_closed = True
            self._doorbell.close()
            self._link.disconnect()

    def _open(self) -> None:
        if self._is_closed:
            raise Unsupported("be used after close()", "this source", "make a new one")


def _just_before(offset: int | str | None) -> str:
    try:
        last = before(str(offset))
    except ValueError as error:
        raise ConfigurationError(
            f"cannot seek to offset {offset!r}: use the position of a delivery, or 0"
        ) from error
    if last.startswith("-"):
        raise ConfigurationError(f"cannot seek to offset {offset}: use 0 or more")
    return last
